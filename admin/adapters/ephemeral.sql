-- name: ephemeral_list
-- Newest first.
SELECT version FROM adapter_versions
WHERE tenant_id = $1 AND name = $2 AND state = 'ready' AND expires_at IS NOT NULL ORDER BY version DESC;

-- name: ephemeral_insert
-- $1: number; $2: digest of the content; $3: seconds that it lives. A statement's own bump is not seen by itself, hence + 1.
INSERT INTO adapter_versions
    (version, state, digest, expires_at, ready_generation, {columns of admin.adapters.versions.NewVersion})
VALUES ($1, 'ready', $2, now() + make_interval(secs => $3), (SELECT generation + 1 FROM catalog_generation),
        {values of admin.adapters.versions.NewVersion});

-- name: ephemeral_is_promoted
-- Whether the plain name means a version that stays.
SELECT EXISTS (SELECT FROM aliases WHERE tenant_id = $1 AND name = $2 AND alias = $3);

-- name: ephemeral_expired
SELECT EXISTS (SELECT FROM adapter_versions WHERE state = 'ready' AND expires_at < now());

-- name: ephemeral_retire_expired
UPDATE adapter_versions
SET state = 'retired', retired_at = now(), retired_generation = (SELECT generation + 1 FROM catalog_generation)
WHERE state = 'ready' AND expires_at < now();
