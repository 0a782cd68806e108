-- name: adapter_ensure
INSERT INTO adapters (tenant_id, name) VALUES ($1, $2) ON CONFLICT (tenant_id, name) DO NOTHING;

-- name: adapter_next_version
UPDATE adapters SET last_version = last_version + 1 WHERE tenant_id = $1 AND name = $2
RETURNING last_version;

-- name: adapter_list
SELECT name, created_at FROM adapters WHERE tenant_id = $1 AND name > $2 ORDER BY name LIMIT $3;

-- name: adapter_find
SELECT name, created_at FROM adapters WHERE tenant_id = $1 AND name = $2;

-- name: adapter_delete
DELETE FROM adapters WHERE tenant_id = $1 AND name = $2;

-- name: version_insert
INSERT INTO adapter_versions (tenant_id, name, version, state, digest, base_name, manifest, error)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
RETURNING tenant_id, name, version, state, created_at, digest, base_name, manifest, error;

-- name: version_list
SELECT tenant_id, name, version, state, created_at, digest, base_name, manifest, error
FROM adapter_versions WHERE tenant_id = $1 AND name = $2 ORDER BY version;

-- name: version_find
SELECT tenant_id, name, version, state, created_at, digest, base_name, manifest, error
FROM adapter_versions WHERE tenant_id = $1 AND name = $2 AND version = $3;

-- name: version_find_content
SELECT tenant_id, name, version, state, created_at, digest, base_name, manifest, error
FROM adapter_versions
WHERE tenant_id = $1 AND name = $2 AND base_name = $3 AND digest = $4 AND state = 'ready';

-- name: version_delete
DELETE FROM adapter_versions WHERE tenant_id = $1 AND name = $2 AND version = $3;

-- name: digests_of_tenant
SELECT DISTINCT digest FROM adapter_versions WHERE tenant_id = $1 AND digest IS NOT NULL;

-- name: digests_in_use
SELECT DISTINCT digest FROM adapter_versions WHERE digest = ANY ($1::text[]);

-- name: catalog_lock
SELECT generation FROM catalog_generation FOR UPDATE;

-- name: alias_list
SELECT tenant_id, name, alias, version FROM aliases WHERE tenant_id = $1 AND name = $2
ORDER BY alias;

-- name: alias_find
SELECT tenant_id, name, alias, version FROM aliases
WHERE tenant_id = $1 AND name = $2 AND alias = $3;

-- name: alias_set
INSERT INTO aliases (tenant_id, name, alias, version) VALUES ($1, $2, $3, $4)
ON CONFLICT (tenant_id, name, alias) DO UPDATE SET version = excluded.version;

-- name: alias_history_insert
INSERT INTO alias_history (tenant_id, name, alias, version, previous, changed_by)
VALUES ($1, $2, $3, $4, $5, $6);

-- name: alias_history
SELECT version, previous, changed_by, changed_at FROM alias_history
WHERE tenant_id = $1 AND name = $2 AND alias = $3 ORDER BY id DESC LIMIT 100;
