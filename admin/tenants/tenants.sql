-- name: tenant_insert
-- Returns no row if another tenant has the name.
INSERT INTO tenants (id, name, sharing_group) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING
RETURNING {columns of store.records.Tenant};

-- name: tenant_list
SELECT {columns of store.records.Tenant} FROM tenants WHERE name > $1 AND deleted_at IS NULL ORDER BY name LIMIT $2;

-- name: tenant_find
SELECT {columns of store.records.Tenant} FROM tenants WHERE deleted_at IS NULL AND (id = $1 OR name = $1);

-- name: tenant_find_past_or_present
-- $1: id or name of a tenant, or id of a deleted tenant. A deleted tenant is found while the audit log has its
-- deletion.
SELECT id, name, sharing_group, require_signature, created_at, NULL AS deleted_at FROM tenants
WHERE (id = $1 OR name = $1) AND deleted_at IS NULL
UNION ALL
SELECT tenant_id AS id, details ->> 'name' AS name, details ->> 'sharing_group' AS sharing_group,
       coalesce((details ->> 'require_signature')::boolean, false) AS require_signature,
       (details ->> 'created_at')::timestamptz AS created_at, at AS deleted_at
FROM audit_log WHERE tenant_id = $1 AND action = 'tenant.delete';

-- name: tenant_names
-- $1: tenant ids. Returns the names of deleted tenants too, while the audit log has their deletion.
SELECT id, name FROM tenants WHERE id = ANY ($1) AND deleted_at IS NULL
UNION ALL
SELECT tenant_id, details ->> 'name' FROM audit_log WHERE tenant_id = ANY ($1) AND action = 'tenant.delete';

-- name: tenant_change
UPDATE tenants SET sharing_group = $2, require_signature = $3 WHERE id = $1
RETURNING {columns of store.records.Tenant};

-- name: tenant_delete
-- Frees the name. The reaper deletes the row after the tenant's adapters.
UPDATE tenants SET deleted_at = now(), name = 'deleted-' || substr(id, 5) WHERE id = $1;

-- name: tenant_delete_keys
WITH gone AS (DELETE FROM api_keys WHERE tenant_id = $1),
     limits AS (DELETE FROM quotas WHERE tenant_id = $1)
DELETE FROM tenant_holdings WHERE tenant_id = $1;

-- name: tenants_to_reap
SELECT id FROM tenants WHERE deleted_at IS NOT NULL ORDER BY deleted_at, id;

-- name: tenant_reap_versions
-- $2: limit. Returns the versions that are deleted next.
SELECT name, version, digest FROM adapter_versions WHERE tenant_id = $1 ORDER BY name, version LIMIT $2;

-- name: tenant_reap_names
-- $2: names of adapters. Frees their versions of aliases.
WITH moves AS (DELETE FROM alias_history WHERE tenant_id = $1 AND name = ANY ($2::text[]))
DELETE FROM aliases WHERE tenant_id = $1 AND name = ANY ($2::text[]);

-- name: tenant_reap
-- $2, $3: names and numbers of the versions to delete; $4: digests of their contents.
WITH doomed AS (
    DELETE FROM adapter_versions
    WHERE tenant_id = $1 AND (name, version) IN (SELECT * FROM unnest($2::text[], $3::integer[]))
)
INSERT INTO loose_contents (digest, holder, due)
SELECT DISTINCT digest, '', now() FROM unnest($4::text[]) AS digest WHERE digest IS NOT NULL
ON CONFLICT DO NOTHING;

-- name: tenant_reap_adapters
DELETE FROM adapters a
WHERE tenant_id = $1
    AND NOT EXISTS (SELECT FROM adapter_versions v WHERE (v.tenant_id, v.name) = (a.tenant_id, a.name));

-- name: tenant_forget
DELETE FROM tenants WHERE id = $1;
