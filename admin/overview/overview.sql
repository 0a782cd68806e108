-- name: overview_gateways
-- $1: limit. Returns gateways that were seen in the last 10 seconds. `load` is null if it was last reported earlier
-- than that.
SELECT id, load
FROM gateways LEFT JOIN gateway_load ON gateway_id = id AND reported_at > now() - interval '10 seconds'
WHERE seen_at > now() - interval '10 seconds' ORDER BY id LIMIT $1;

-- name: overview_counts
SELECT (SELECT count(*) FROM tenants WHERE deleted_at IS NULL) AS num_tenants, (SELECT count(*) FROM adapters) AS num_adapters,
       (SELECT count(*) FROM workers) AS num_workers;

-- name: overview_models
SELECT name, digest FROM base_models ORDER BY name LIMIT $1;

-- name: overview_names
SELECT id, name FROM tenants WHERE id = ANY($1);
