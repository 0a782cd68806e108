-- name: adapter_ensure
-- Returns whether the tenant exists and is not deleted.
WITH owner AS (
    SELECT id FROM tenants WHERE id = $1 AND deleted_at IS NULL
), made AS (
    INSERT INTO adapters (tenant_id, name) SELECT id, $2 FROM owner ON CONFLICT (tenant_id, name) DO NOTHING
)
SELECT EXISTS (SELECT FROM owner);

-- name: adapter_list
-- $1: tenant id, or null for all tenants; $2, $3: names of the tenant and the adapter at which the previous page ended;
-- $4: limit; $5: name of the only adapter to return, or null; $6: maximum age of a worker's report in seconds. `tiers`
-- is empty if the connection may not see workers. Omits an adapter whose versions are all retired: it is deleted,
-- although requests in flight may still use it.
WITH page AS MATERIALIZED (
    SELECT a.tenant_id, t.name AS tenant, a.name, a.created_at, v.states, v.last_state, p.aliases, p.pinned, p.canaries
    FROM adapters a JOIN tenants t ON t.id = a.tenant_id AND t.deleted_at IS NULL
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
    ORDER BY t.name, a.name LIMIT $4
), contents AS MATERIALIZED (
    SELECT c.tenant_id, c.name, c.version, c.digest
    FROM page CROSS JOIN LATERAL (
        SELECT version FROM aliases WHERE (tenant_id, name) = (page.tenant_id, page.name)
        UNION SELECT version FROM canary_targets WHERE (tenant_id, name) = (page.tenant_id, page.name)) pointed
    JOIN adapter_versions c ON (c.tenant_id, c.name, c.version) = (page.tenant_id, page.name, pointed.version)
), heard AS (
    SELECT c.tenant_id, c.name, jsonb_agg(
               jsonb_build_object('worker', w.id, 'tier', h.tier, 'version', c.version) ORDER BY c.version, w.id) AS tiers
    FROM workers w, jsonb_to_recordset(w.status -> 'adapters') AS h (digest text, tier text) JOIN contents c USING (digest)
    WHERE h.tier <> '' AND w.reported_at > now() - make_interval(secs => $6) GROUP BY c.tenant_id, c.name
)
SELECT page.*, coalesce(heard.tiers, '[]') AS tiers
FROM page LEFT JOIN heard USING (tenant_id, name) ORDER BY page.tenant, page.name;

-- name: content_names
-- $1: digests of contents. Returns the ready versions that have these contents.
SELECT v.digest, t.name || '/' || v.name || '@' || v.version AS name
FROM adapter_versions v JOIN tenants t ON t.id = v.tenant_id AND t.deleted_at IS NULL
WHERE v.digest = ANY ($1) AND v.state = 'ready' ORDER BY t.name, v.name, v.version;
