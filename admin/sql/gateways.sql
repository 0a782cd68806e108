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

-- name: faults_report
-- $1: worker id; $2: all adapters that it could not load, [{digest, code, message}].
WITH reported AS (
    SELECT digest, code, message FROM jsonb_to_recordset($2) AS f (digest text, code text, message text)
), gone AS (
    DELETE FROM adapter_faults WHERE worker = $1 AND digest NOT IN (SELECT digest FROM reported)
)
INSERT INTO adapter_faults AS f (digest, worker, code, message)
SELECT digest, $1, code, message FROM reported
ON CONFLICT (digest, worker) DO UPDATE SET code = excluded.code, message = excluded.message, since = now()
WHERE (f.code, f.message) IS DISTINCT FROM (excluded.code, excluded.message);

-- name: faults_forget
-- $1: ids of the workers that are there.
DELETE FROM adapter_faults WHERE NOT worker = ANY ($1::text[]);
