-- name: key_insert
INSERT INTO api_keys (id, tenant_id, hash, replaces, family, {columns of admin.keys.schemas.KeyCreate}, cidrs)
VALUES ($1, $2, $3, $4, (SELECT coalesce(family, id) FROM api_keys WHERE id = $4),
        {values of admin.keys.schemas.KeyCreate})
RETURNING {columns of store.records.ApiKey}, cidrs::text[] AS cidrs;

-- name: key_find
SELECT {columns of admin.keys.keys.KeyDetails}, cidrs::text[] AS cidrs
FROM api_keys LEFT JOIN key_uses ON key_id = id WHERE id = $1;

-- name: keys_shown
-- $1: ids of keys that requests present. Returns keys of all tenants, because a request's tenant is known only from its
-- key.
SELECT {key.columns of store.records.ApiKey}, key.cidrs::text[] AS cidrs
FROM unnest($1::text[]) AS shown (id), key_by_id(shown.id) AS key;

-- name: key_list
-- $1: tenant id, or null for the admin keys.
SELECT {columns of admin.keys.keys.KeyDetails}, cidrs::text[] AS cidrs
FROM api_keys LEFT JOIN key_uses ON key_id = id
WHERE tenant_id IS NOT DISTINCT FROM $1 AND id > $2 ORDER BY id LIMIT $3;

-- name: key_end
-- Makes the key expire at $2, unless it expires earlier.
UPDATE api_keys SET expires_at = least(expires_at, $2) WHERE id = $1;

-- name: key_revoke
UPDATE api_keys SET revoked_at = now() WHERE id = $1 AND revoked_at IS NULL;

-- name: admin_key_beside
-- Returns whether an admin key other than $1 is valid now and never expires.
SELECT EXISTS (
    SELECT FROM api_keys
    WHERE tenant_id IS NULL AND id <> $1 AND revoked_at IS NULL AND expires_at IS NULL
          AND coalesce(not_before <= now(), true)
);

-- name: keys_used
-- $1: key ids; $2: time at which each key was last used. Updates a key at most every 50 seconds, even if many gateways
-- use it. Skips a key that is being deleted.
INSERT INTO key_uses AS u (key_id, last_used_at)
SELECT k.id, o.at FROM unnest($1::text[], $2::timestamptz[]) AS o (id, at) JOIN api_keys k ON k.id = o.id
ORDER BY k.id FOR KEY SHARE OF k SKIP LOCKED
ON CONFLICT (key_id) DO UPDATE SET last_used_at = excluded.last_used_at
WHERE u.last_used_at < excluded.last_used_at - interval '50 seconds';
