-- Ephemeral versions: loaded by training loops, ready without an effect proof, and retired by themselves. A loop may load
-- the same content twice, and the same content may be pushed as a version that stays.

ALTER TABLE adapter_versions ADD COLUMN expires_at timestamptz;

DROP INDEX adapter_versions_content;
CREATE UNIQUE INDEX adapter_versions_content
    ON adapter_versions (tenant_id, name, base_name, digest, md5(serving::text))
    WHERE state IN ('proving', 'ready') AND expires_at IS NULL;
CREATE INDEX adapter_versions_ephemeral ON adapter_versions (expires_at) WHERE state = 'ready' AND expires_at IS NOT NULL;
