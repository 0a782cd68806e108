-- name: adapter_ensure
INSERT INTO adapters (tenant_id, name) VALUES ($1, $2) ON CONFLICT (tenant_id, name) DO NOTHING;

-- name: adapter_list
-- $1: the tenant's id, null for those of all; $2, $3: names of the tenant and the adapter where the page before ended;
-- $5: the one that is asked for, or null.
-- One whose versions are all retired is deleted already, for everyone but the requests that still have it.
SELECT t.name AS tenant, a.name, a.created_at, v.states, v.last_state, p.aliases, p.pinned, p.canaries,
       (SELECT coalesce(jsonb_object_agg(c.version::text, c.digest), '{}') FROM adapter_versions c
        WHERE (c.tenant_id, c.name) = (a.tenant_id, a.name) AND c.version IN (
            SELECT version FROM aliases WHERE (tenant_id, name) = (a.tenant_id, a.name)
            UNION SELECT version FROM canary_targets WHERE (tenant_id, name) = (a.tenant_id, a.name))) AS contents
FROM adapters a JOIN tenants t ON t.id = a.tenant_id
CROSS JOIN LATERAL (
    SELECT coalesce(jsonb_object_agg(s.alias, s.version), '{}') AS aliases,
           coalesce(array_agg(s.alias ORDER BY s.alias) FILTER (WHERE s.pinned), '{}') AS pinned,
           coalesce(jsonb_object_agg(s.alias, w.weights) FILTER (WHERE w.weights IS NOT NULL), '{}') AS canaries
    FROM aliases s CROSS JOIN LATERAL (
        SELECT jsonb_object_agg(version::text, weight) AS weights FROM canary_targets
        WHERE (tenant_id, name, alias) = (s.tenant_id, s.name, s.alias)) w
    WHERE (s.tenant_id, s.name) = (a.tenant_id, a.name)
) p
CROSS JOIN LATERAL (
    SELECT jsonb_object_agg(state, num) AS states, (array_agg(state ORDER BY last DESC))[1] AS last_state
    FROM (SELECT version_state(state, serving) AS state, count(*) AS num, max(version) AS last FROM adapter_versions
          WHERE (tenant_id, name) = (a.tenant_id, a.name) AND state <> 'retired' GROUP BY 1) counted
) v
WHERE (a.tenant_id = $1 OR $1::text IS NULL) AND (t.name, a.name) > ($2, $3) AND v.states IS NOT NULL
    AND ($5::text IS NULL OR a.name = $5)
ORDER BY t.name, a.name LIMIT $4;

-- name: content_tiers
-- $1: digests; where each worker that is heard of has them. Nothing where the connection sees no worker.
SELECT h.digest, w.id AS worker, h.tier
FROM workers w, jsonb_to_recordset(w.status -> 'adapters') AS h (digest text, tier text)
WHERE h.digest = ANY ($1) AND h.tier <> '' AND w.reported_at > now() - make_interval(secs => $2)
ORDER BY w.id;

-- name: content_names
-- $1: digests; the versions that have these contents.
SELECT v.digest, t.name || '/' || v.name || '@' || v.version AS name
FROM adapter_versions v JOIN tenants t ON t.id = v.tenant_id
WHERE v.digest = ANY ($1) AND v.state = 'ready' ORDER BY t.name, v.name, v.version;
