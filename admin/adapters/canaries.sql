-- name: outcomes_add
-- $1: gateway id; $2: [{change, version, requests, errors, ttft}], where `change` is the id of the move that started
-- the canary. Drops the outcomes of a canary whose alias has been moved since. A bucket is a thirtieth of the policy's
-- window (300 s by default), but at least 10 s, because each gateway reads all buckets of the window every 2 s.
INSERT INTO version_outcomes AS v (change, version, bucket, gateway_id, requests, errors, ttft)
SELECT o.change, o.version,
       date_bin(make_interval(secs => greatest(10, coalesce((a.policy ->> 'window_s')::integer, 300) / 30)), now(), 'epoch'),
       $1, o.requests, o.errors, o.ttft
FROM jsonb_to_recordset($2)
    AS o (change bigint, version integer, requests integer, errors integer, ttft integer[])
JOIN alias_history h ON h.id = o.change
JOIN aliases a ON (a.tenant_id, a.name, a.alias, a.change) = (h.tenant_id, h.name, h.alias, h.id)
ON CONFLICT (change, version, bucket, gateway_id) DO UPDATE
SET requests = v.requests + excluded.requests,
    errors = v.errors + excluded.errors,
    ttft = ARRAY(SELECT coalesce(had, 0) + coalesce(came, 0)
                 FROM unnest(v.ttft, excluded.ttft) WITH ORDINALITY AS t (had, came, step) ORDER BY step);

-- name: outcomes_of
-- $1: ids of the moves that started canaries; $2: for each of these moves, the window in seconds that ends now.
WITH seen AS (
    SELECT o.change, o.version, o.requests, o.errors, o.ttft
    FROM unnest($1::bigint[], $2::integer[]) AS asked (change, window_s) JOIN version_outcomes o USING (change)
    WHERE o.bucket > now() - asked.window_s * interval '1 second'
), totals AS (
    SELECT change, version, sum(requests)::integer AS requests, sum(errors)::integer AS errors
    FROM seen GROUP BY change, version
), steps AS (
    SELECT change, version, step, sum(count)::integer AS count
    FROM seen CROSS JOIN unnest(ttft) WITH ORDINALITY AS t (count, step) GROUP BY change, version, step
), histograms AS (
    SELECT change, version, array_agg(count ORDER BY step) AS ttft FROM steps GROUP BY change, version
)
SELECT change, version, requests, errors, coalesce(ttft, '{}') AS ttft
FROM totals LEFT JOIN histograms USING (change, version);

-- name: outcomes_prune
DELETE FROM version_outcomes WHERE bucket < now() - interval '25 hours';

-- name: canary_roll_back
-- $1-$3: tenant id, adapter name and alias; $4: the stable version; $5: reason in words; $6: id of the move that
-- started the canary. Returns null if the alias has been moved since.
SELECT point_alias($1, $2, $3, $4, NULL, NULL, NULL, 'auto_rollback', $5, $6);
