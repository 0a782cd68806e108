-- name: version_retire
-- `generation + 1` is the generation after this statement: its trigger increments the generation, but a statement does
-- not see what its triggers write. Other transactions see both changes at once.
UPDATE adapter_versions
SET state = 'retired', retired_at = now(), retired_generation = (SELECT generation + 1 FROM catalog_generation)
WHERE tenant_id = $1 AND name = $2 AND version = ANY ($3::integer[]) AND state NOT IN ('retired', 'rejected');

-- name: version_forget
-- Deletes rejected versions at once, because no request can use them.
DELETE FROM adapter_versions
WHERE tenant_id = $1 AND name = $2 AND version = ANY ($3::integer[]) AND state = 'rejected';

-- name: aliases_clear
WITH moves AS (DELETE FROM alias_history WHERE tenant_id = $1 AND name = $2)
DELETE FROM aliases WHERE tenant_id = $1 AND name = $2;

-- name: retirement_progress
-- $1: catalog generation of the retirement; $2: retired versions in the form TENANT_ID/NAME/VERSION.
SELECT coalesce(bool_and(generation >= $1), true) AS is_known,
       coalesce(sum((SELECT sum(value::bigint) FROM jsonb_each_text(in_flight) WHERE key = ANY ($2::text[]))), 0)::bigint
           AS in_flight
FROM gateways WHERE seen_at > now() - interval '10 seconds';

-- name: gateways_gone
-- $1: seconds for which a gateway without the database serves from its last catalog.
DELETE FROM gateways WHERE seen_at < now() - make_interval(secs => greatest($1::float8, 15));

-- name: versions_to_reap
SELECT tenant_id, name, version, digest FROM adapter_versions v
WHERE state = 'retired' AND NOT EXISTS (
    SELECT FROM gateways g
    WHERE g.seen_at > now() - interval '15 seconds'
        AND (g.generation < v.retired_generation
             OR jsonb_exists(g.in_flight, v.tenant_id || '/' || v.name || '/' || v.version)));

-- name: version_delete
DELETE FROM adapter_versions WHERE tenant_id = $1 AND name = $2 AND version = $3;

-- name: adapters_to_reap
SELECT tenant_id, name FROM adapters a
WHERE NOT EXISTS (SELECT FROM adapter_versions v WHERE (v.tenant_id, v.name) = (a.tenant_id, a.name));

-- name: adapter_delete
DELETE FROM adapters WHERE tenant_id = $1 AND name = $2;

-- name: faults_prune
DELETE FROM adapter_faults f WHERE NOT EXISTS (SELECT FROM adapter_versions v WHERE v.digest = f.digest);
