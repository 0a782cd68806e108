-- name: tenant_insert
-- Nothing if the name is taken.
INSERT INTO tenants (id, name, sharing_group) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING
RETURNING id, name, sharing_group, created_at;

-- name: tenant_list
SELECT id, name, sharing_group, created_at FROM tenants WHERE name > $1 ORDER BY name LIMIT $2;

-- name: tenant_find
SELECT id, name, sharing_group, created_at FROM tenants WHERE id = $1 OR name = $1;

-- name: tenant_set_sharing_group
UPDATE tenants SET sharing_group = $2 WHERE id = $1
RETURNING id, name, sharing_group, created_at;

-- name: tenant_delete
DELETE FROM tenants WHERE id = $1;
