-- name: gateway_report
-- $1: gateway id; $2: generation of the catalog that new requests are resolved in; $3: requests in flight by version.
INSERT INTO gateways (id, generation, in_flight) VALUES ($1, $2, $3)
ON CONFLICT (id) DO UPDATE
SET generation = excluded.generation, in_flight = excluded.in_flight, seen_at = now();

-- name: gateways_behind
-- $1: a generation of the catalog; $2: seconds for which a gateway without the database serves from its last catalog.
-- Returns the number of gateways that may use an earlier catalog, and how many of them are connected to the database.
SELECT count(*) AS behind, count(*) FILTER (WHERE seen_at > now() - interval '10 seconds') AS connected
FROM gateways WHERE generation < $1 AND seen_at > now() - make_interval(secs => $2);

-- name: gateway_leave
DELETE FROM gateways WHERE id = $1;

-- name: gateway_load_report
-- $1: gateway id; $2: what it served of late. Before its first heartbeat, which comes at once, there is nothing to tell.
INSERT INTO gateway_load (gateway_id, load) SELECT id, $2 FROM gateways WHERE id = $1
ON CONFLICT (gateway_id) DO UPDATE SET load = excluded.load, reported_at = now();
