-- name: ephemeral_list
-- Returns the adapter's ready ephemeral versions, newest first.
SELECT version FROM adapter_versions
WHERE tenant_id = $1 AND name = $2 AND state = 'ready' AND expires_at IS NOT NULL ORDER BY version DESC;

-- name: ephemeral_insert
-- $1: version number; $2: digest of the content; $3: seconds until the version expires. `generation + 1` is the
-- generation after this statement: its trigger increments the generation, but a statement does not see what its
-- triggers write.
INSERT INTO adapter_versions
    (version, state, digest, expires_at, ready_generation, {columns of admin.adapters.versions.NewVersion})
VALUES ($1, 'ready', $2, now() + make_interval(secs => $3), (SELECT generation + 1 FROM catalog_generation),
        {values of admin.adapters.versions.NewVersion});

-- name: ephemeral_is_promoted
-- $3: prod. Returns whether the adapter has this alias, so that its plain name does not refer to an ephemeral version.
SELECT EXISTS (SELECT FROM aliases WHERE tenant_id = $1 AND name = $2 AND alias = $3);

-- name: ephemeral_expired
SELECT EXISTS (SELECT FROM adapter_versions WHERE state = 'ready' AND expires_at < now());

-- name: ephemeral_retire_expired
UPDATE adapter_versions
SET state = 'retired', retired_at = now(), retired_generation = (SELECT generation + 1 FROM catalog_generation)
WHERE state = 'ready' AND expires_at < now();
