-- name: gateway_report
-- $1: gateway id; $2: generation of the catalog that new requests are resolved in; $3: requests in flight by version.
INSERT INTO gateways (id, generation, in_flight) VALUES ($1, $2, $3)
ON CONFLICT (id) DO UPDATE
SET generation = excluded.generation, in_flight = excluded.in_flight, seen_at = now();

-- name: gateways_know
-- Whether all that live go by the catalog of this generation, or a later one.
SELECT NOT EXISTS (SELECT FROM gateways WHERE generation < $1 AND seen_at > now() - interval '10 seconds');

-- name: gateway_leave
DELETE FROM gateways WHERE id = $1;

-- name: gateway_load_report
-- $1: gateway id; $2: what it served of late. Before its first heartbeat, which comes at once, there is nothing to tell.
INSERT INTO gateway_load (gateway_id, load) SELECT id, $2 FROM gateways WHERE id = $1
ON CONFLICT (gateway_id) DO UPDATE SET load = excluded.load, reported_at = now();
