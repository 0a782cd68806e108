-- name: alias_list
-- $3: name of the only alias to return, or null for all aliases of the adapter.
SELECT {a.columns of store.records.Alias},
       (SELECT jsonb_object_agg(t.version::text, t.weight) FROM canary_targets t
        WHERE (t.tenant_id, t.name, t.alias) = (a.tenant_id, a.name, a.alias)) AS canary
FROM aliases a WHERE a.tenant_id = $1 AND a.name = $2 AND ($3::text IS NULL OR a.alias = $3) ORDER BY a.alias;

-- name: alias_point
-- $4: version; $5: canary; $6: policy; $7: key id; $8: reason; $9: detail; $10: id that the alias's last move must
-- have, or null.
SELECT point_alias($1, $2, $3, $4, $5, $6, $7, $8, $9, $10);

-- name: alias_history
SELECT {columns of admin.adapters.aliases.AliasMove} FROM alias_history
WHERE tenant_id = $1 AND name = $2 AND alias = $3 ORDER BY id DESC LIMIT 100;

-- name: alias_before
-- Returns the last move before move $4 whose versions all still exist, or the deletion of the alias if that came later.
-- If moves to deleted versions are skipped, earlier moves to the target of move $4 are skipped too, because restoring
-- that target would change nothing.
SELECT h.version, h.canary, h.policy, h.reason FROM alias_history h
WHERE h.tenant_id = $1 AND h.name = $2 AND h.alias = $3 AND h.id < $4 AND (h.reason = 'deleted' OR (
    NOT EXISTS (
        SELECT FROM jsonb_object_keys(coalesce(h.canary, '{}') || jsonb_build_object(h.version, 1)) AS needed (version)
        WHERE NOT EXISTS (
            SELECT FROM adapter_versions v
            WHERE v.tenant_id = $1 AND v.name = $2 AND v.version = needed.version::integer))
    AND (h.id = (SELECT max(id) FROM alias_history WHERE tenant_id = $1 AND name = $2 AND alias = $3 AND id < $4)
         OR NOT EXISTS (
            SELECT FROM alias_history now
            WHERE now.id = $4 AND now.version = h.version AND now.canary IS NOT DISTINCT FROM h.canary))))
ORDER BY h.id DESC LIMIT 1;

-- name: alias_delete
WITH gone AS (
    DELETE FROM aliases WHERE tenant_id = $1 AND name = $2 AND alias = $3 RETURNING tenant_id, name, alias, version
)
INSERT INTO alias_history (tenant_id, name, alias, version, previous, changed_by, reason)
SELECT tenant_id, name, alias, version, version, $4, 'deleted' FROM gone;

-- name: alias_pin
UPDATE aliases SET pinned = $4 WHERE tenant_id = $1 AND name = $2 AND alias = $3;

-- name: pinned_bytes
SELECT pinned_bytes($1) AS used, (SELECT pin_bytes FROM tenants WHERE id = $1) AS allowed;
