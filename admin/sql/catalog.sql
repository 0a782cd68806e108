-- name: catalog_generation
SELECT generation FROM catalog_generation;

-- name: catalog_tenants
SELECT id, name, sharing_group, created_at FROM tenants ORDER BY id;

-- name: catalog_keys
SELECT id, tenant_id, hash, scopes, expires_at, revoked_at, name, created_at
FROM api_keys WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
ORDER BY id;

-- name: catalog_models
SELECT name, digest, shape, max_model_len, created_at FROM base_models ORDER BY name;

-- name: catalog_versions
SELECT tenant_id, name, version, state, created_at, digest, base_name
FROM adapter_versions WHERE state = 'ready' ORDER BY tenant_id, name, version;

-- name: catalog_aliases
SELECT tenant_id, name, alias, version FROM aliases ORDER BY tenant_id, name, alias;
