-- name: tenant_insert
-- Returns no row if another tenant has the name.
INSERT INTO tenants (id, name, sharing_group) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING
RETURNING {columns of store.records.Tenant};

-- name: tenant_list
SELECT {columns of store.records.Tenant} FROM tenants WHERE name > $1 ORDER BY name LIMIT $2;

-- name: tenant_find
SELECT {columns of store.records.Tenant} FROM tenants WHERE id = $1 OR name = $1;

-- name: tenant_find_past_or_present
-- $1: id or name of a tenant, or id of a deleted tenant. A deleted tenant is found while the audit log has its
-- deletion.
SELECT id, name, sharing_group, require_signature, created_at, NULL AS deleted_at FROM tenants WHERE id = $1 OR name = $1
UNION ALL
SELECT tenant_id AS id, details ->> 'name' AS name, details ->> 'sharing_group' AS sharing_group,
       coalesce((details ->> 'require_signature')::boolean, false) AS require_signature,
       (details ->> 'created_at')::timestamptz AS created_at, at AS deleted_at
FROM audit_log WHERE tenant_id = $1 AND action = 'tenant.delete';

-- name: tenant_names
-- $1: tenant ids. Returns the names of deleted tenants too, while the audit log has their deletion.
SELECT id, name FROM tenants WHERE id = ANY ($1)
UNION ALL
SELECT tenant_id, details ->> 'name' FROM audit_log WHERE tenant_id = ANY ($1) AND action = 'tenant.delete';

-- name: tenant_change
UPDATE tenants SET sharing_group = $2, require_signature = $3 WHERE id = $1
RETURNING {columns of store.records.Tenant};

-- name: tenant_delete
DELETE FROM tenants WHERE id = $1;
