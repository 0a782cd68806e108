-- Numbers of adapters that were deleted before 0002, as far as usage, the audit log or the limits of a key have them.
-- In a transaction of its own, because it reads much and locks no table.

INSERT INTO adapter_numbers AS n (tenant_id, name, last_version)
SELECT tenant_id, name, max(version)
FROM (
    SELECT tenant_id, adapter AS name, adapter_version AS version FROM usage_hourly WHERE adapter_version > 0
    UNION ALL
    SELECT tenant_id, split_part(object, '@', 1), split_part(object, '@', 2)::integer
    FROM audit_log WHERE action = 'version.create'
    UNION ALL
    SELECT tenant_id, split_part(model, '@', 1), split_part(model, '@', 2)::integer
    FROM (SELECT tenant_id, regexp_replace(unnest(models), '^.*/', '') AS model FROM api_keys) limited
    WHERE model ~ '^[^@]+@[0-9]{1,9}$'
) used
WHERE tenant_id IN (SELECT id FROM tenants)
GROUP BY tenant_id, name
ON CONFLICT (tenant_id, name) DO UPDATE SET last_version = greatest(n.last_version, excluded.last_version);

-- Adapters that were deleted and made again before 0002.
UPDATE adapters a SET last_version = n.last_version
FROM adapter_numbers n
WHERE (n.tenant_id, n.name) = (a.tenant_id, a.name) AND n.last_version > a.last_version;
