-- A version without a signature takes no alias when it becomes ready, if its tenant requires signatures. Such a version
-- was uploaded before they were required.

CREATE OR REPLACE FUNCTION version_takes_aliases(made adapter_versions) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF made.signature IS NULL AND (SELECT require_signature FROM tenants WHERE id = made.tenant_id) THEN
        RETURN;
    END IF;
    IF NOT coalesce((made.manifest ->> 'equals_base')::boolean, false)
        AND NOT EXISTS (SELECT FROM aliases WHERE (tenant_id, name, alias) = (made.tenant_id, made.name, 'prod'))
    THEN
        PERFORM point_alias(
            made.tenant_id, made.name, 'prod', made.version, NULL, NULL, made.uploaded_by, 'first', NULL, NULL);
    END IF;
    IF made.wanted_alias IS NOT NULL AND NOT EXISTS (
        SELECT FROM alias_history
        WHERE (tenant_id, name, alias) = (made.tenant_id, made.name, made.wanted_alias)
            AND changed_at > made.created_at
            AND (reason NOT IN ('first', 'upload') OR version > made.version))
    THEN
        BEGIN
            PERFORM point_alias(
                made.tenant_id, made.name, made.wanted_alias, made.version, NULL, NULL, made.uploaded_by, 'upload',
                NULL, NULL);
            IF pinned_bytes(made.tenant_id) > (SELECT pin_bytes FROM tenants WHERE id = made.tenant_id) THEN
                RAISE EXCEPTION 'over the pin quota' USING ERRCODE = 'LPX01';
            END IF;
            UPDATE adapter_versions SET wanted_alias = NULL
                WHERE (tenant_id, name, version) = (made.tenant_id, made.name, made.version);
        EXCEPTION WHEN SQLSTATE 'LPX01' THEN
            NULL;
        END;
    END IF;
END $$;
