-- name: catalog_lock
SELECT generation FROM catalog_generation FOR UPDATE;

-- name: catalog_generation
SELECT generation FROM catalog_generation;

-- name: catalog_state
-- A server that has started anew may be another one, or may have been set back.
SELECT generation, pg_postmaster_start_time() AS server FROM catalog_generation;

-- name: catalog_changed
-- $1: a generation. Tenants, and with a name adapters, of which anything has changed since.
SELECT tenant_id, name FROM catalog_changes WHERE generation > $1;

-- $1 of the following, where they take it: of these tenants; null: of all. $2: adapters of such names, so that others
-- may be among them that two tenants call alike.

-- name: catalog_tenants
SELECT {columns of store.records.Tenant} FROM tenants
WHERE ($1::text[] IS NULL OR id = ANY ($1)) AND deleted_at IS NULL ORDER BY id;

-- name: catalog_keys
-- Admin keys, which belong to no tenant, each time.
SELECT {columns of store.records.ApiKey}, cidrs::text[] AS cidrs
FROM api_keys
WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
  AND ($1::text[] IS NULL OR tenant_id = ANY ($1) OR tenant_id IS NULL)
  AND (tenant_id IS NULL OR tenant_id NOT IN (SELECT id FROM tenants WHERE deleted_at IS NOT NULL))
ORDER BY id;

-- name: catalog_models
SELECT {columns of store.records.BaseModel} FROM base_models ORDER BY name;

-- name: catalog_versions
SELECT {columns of store.records.ServedVersion}, expires_at IS NOT NULL AS is_ephemeral,
       coalesce(manifest -> 'invocation_tokens', '[]') AS invocation_tokens,
       (SELECT public_key FROM signing_keys k WHERE (k.tenant_id, k.id) = (v.tenant_id, v.signed_by)) AS public_key
FROM adapter_versions v
WHERE state = 'ready' AND ($1::text[] IS NULL OR tenant_id = ANY ($1) AND name = ANY ($2::text[]))
    AND tenant_id NOT IN (SELECT id FROM tenants WHERE deleted_at IS NOT NULL)
ORDER BY tenant_id, name, version;

-- name: catalog_aliases
SELECT {a.columns of store.records.Alias},
       (SELECT jsonb_object_agg(t.version::text, t.weight) FROM canary_targets t
        WHERE (t.tenant_id, t.name, t.alias) = (a.tenant_id, a.name, a.alias)) AS canary
FROM aliases a
WHERE ($1::text[] IS NULL OR a.tenant_id = ANY ($1) AND a.name = ANY ($2::text[]))
    AND a.tenant_id NOT IN (SELECT id FROM tenants WHERE deleted_at IS NOT NULL)
ORDER BY a.tenant_id, a.name, a.alias;

-- name: catalog_proofs
SELECT {p.columns of store.records.AdapterProof} FROM adapter_proofs p
WHERE p.digest IN (SELECT v.digest FROM adapter_versions v
                   WHERE v.state = 'ready' AND ($1::text[] IS NULL OR v.tenant_id = ANY ($1) AND v.name = ANY ($2::text[])))
ORDER BY p.digest, p.base_digest, p.layout;

-- name: catalog_approved_templates
SELECT digest FROM approved_templates;

-- name: catalog_quotas
SELECT {columns of store.records.Quota} FROM quotas WHERE $1::text[] IS NULL OR tenant_id = ANY ($1) ORDER BY subject;

-- name: catalog_prices
SELECT {columns of store.records.Price} FROM prices ORDER BY model;

-- name: catalog_workers
SELECT id, address, leased_until IS NOT NULL AS is_registered, draining FROM workers
WHERE leased_until IS NOT NULL OR draining IS NOT NULL ORDER BY registered_at, id;

-- name: plan_each
-- For what is asked of a few or of all, in this transaction: a plan for either would read all for a few, and be kept by
-- the connection.
SELECT set_config('plan_cache_mode', 'force_custom_plan', true);
