-- name: adapter_ensure
INSERT INTO adapters (tenant_id, name) VALUES ($1, $2) ON CONFLICT (tenant_id, name) DO NOTHING;

-- name: adapter_list
-- One whose versions are all retired is deleted already, for everyone but the requests that still have it.
SELECT a.name, a.created_at, v.states, v.last_state,
       (SELECT coalesce(jsonb_object_agg(s.alias, s.version), '{}') FROM aliases s
        WHERE (s.tenant_id, s.name) = (a.tenant_id, a.name)) AS aliases
FROM adapters a
CROSS JOIN LATERAL (
    SELECT jsonb_object_agg(state, num) AS states, (array_agg(state ORDER BY last DESC))[1] AS last_state
    FROM (SELECT version_state(state, serving) AS state, count(*) AS num, max(version) AS last FROM adapter_versions
          WHERE (tenant_id, name) = (a.tenant_id, a.name) AND state <> 'retired' GROUP BY 1) counted
) v
WHERE a.tenant_id = $1 AND a.name > $2 AND v.states IS NOT NULL
ORDER BY a.name LIMIT $3;

-- name: adapter_find
SELECT name, created_at FROM adapters a
WHERE tenant_id = $1 AND name = $2 AND EXISTS (
    SELECT FROM adapter_versions v
    WHERE (v.tenant_id, v.name) = (a.tenant_id, a.name) AND v.state <> 'retired');
