-- name: signing_key_insert
-- Returns no row if the tenant already has this public key.
INSERT INTO signing_keys (id, tenant_id, name, public_key) VALUES ($1, $2, $3, $4)
ON CONFLICT (tenant_id, public_key) DO NOTHING
RETURNING {columns of admin.signing_keys.signing_keys.SigningKey}, encode(public_key, 'base64') AS public_key, 0 AS versions;

-- name: signing_key_list
-- $2: id of the previous page's last key; $3: limit, or null; $4: id of the only key to return, or null.
SELECT {columns of admin.signing_keys.signing_keys.SigningKey}, encode(public_key, 'base64') AS public_key,
       (SELECT count(*) FROM adapter_versions v WHERE (v.tenant_id, v.signed_by) = (k.tenant_id, k.id)) AS versions
FROM signing_keys k WHERE tenant_id = $1 AND id > $2 AND ($4::text IS NULL OR id = $4) ORDER BY id LIMIT $3;

-- name: signing_key_revoke
UPDATE signing_keys SET revoked_at = now() WHERE tenant_id = $1 AND id = $2 AND revoked_at IS NULL;

-- name: signature_required
SELECT require_signature FROM tenants WHERE id = $1;

-- name: version_sign
-- Stores the signature of an existing version. $4: id of the signing key; $5: signature.
UPDATE adapter_versions SET signed_by = $4, signature = $5 WHERE tenant_id = $1 AND name = $2 AND version = $3;
