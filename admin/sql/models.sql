-- name: model_insert
INSERT INTO base_models (name, digest, shape, max_model_len) VALUES ($1, $2, $3, $4)
RETURNING name, digest, shape, max_model_len, created_at;

-- name: model_update
UPDATE base_models SET digest = $2, shape = $3, max_model_len = $4 WHERE name = $1
RETURNING name, digest, shape, max_model_len, created_at;

-- name: model_list
SELECT name, digest, shape, max_model_len, created_at FROM base_models
WHERE name > $1 ORDER BY name LIMIT $2;

-- name: model_find
SELECT name, digest, shape, max_model_len, created_at FROM base_models WHERE name = $1;

-- name: model_delete
DELETE FROM base_models WHERE name = $1;

-- name: model_in_use
SELECT EXISTS (SELECT FROM adapter_versions WHERE base_name = $1);
