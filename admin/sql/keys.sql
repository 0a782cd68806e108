-- name: key_insert
INSERT INTO api_keys (id, tenant_id, hash, scopes, expires_at, name) VALUES ($1, $2, $3, $4, $5, $6)
RETURNING id, tenant_id, hash, scopes, expires_at, revoked_at, name, created_at;

-- name: key_find
SELECT id, tenant_id, hash, scopes, expires_at, revoked_at, name, created_at
FROM api_keys WHERE id = $1;

-- name: key_list
SELECT id, tenant_id, hash, scopes, expires_at, revoked_at, name, created_at
FROM api_keys WHERE tenant_id = $1 AND id > $2 ORDER BY id LIMIT $3;

-- name: key_list_admin
SELECT id, tenant_id, hash, scopes, expires_at, revoked_at, name, created_at
FROM api_keys WHERE tenant_id IS NULL AND id > $1 ORDER BY id LIMIT $2;

-- name: key_revoke
UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE id = $1
RETURNING id, tenant_id, hash, scopes, expires_at, revoked_at, name, created_at;
