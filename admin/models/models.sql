-- name: model_insert
INSERT INTO base_models (name, digest, shape, max_model_len, source) VALUES ($1, $2, $3, $4, $5)
RETURNING {columns of store.records.BaseModel};

-- name: model_update
UPDATE base_models SET digest = $2, shape = $3, max_model_len = $4,
    source = CASE WHEN digest = $2::content_digest AND $5 = '' THEN source ELSE $5 END
WHERE name = $1
RETURNING {columns of store.records.BaseModel};

-- name: model_list
SELECT {columns of store.records.BaseModel} FROM base_models
WHERE name > $1 ORDER BY name LIMIT $2;

-- name: model_find
SELECT {columns of store.records.BaseModel} FROM base_models WHERE name = $1;

-- name: model_delete
DELETE FROM base_models WHERE name = $1;

-- name: model_in_use
SELECT EXISTS (SELECT FROM adapter_versions WHERE base_name = $1);

-- name: model_set_residency
UPDATE base_models SET residency = $2 WHERE name = $1
RETURNING {columns of store.records.BaseModel};

-- name: model_states
-- $1: digests of base models; $2: maximum age of a worker's report in seconds. Returns the state of these models on
-- each worker, as reported.
SELECT id AS worker, state.*, reported_at,
       CASE WHEN idle_s > 0 THEN reported_at - make_interval(secs => idle_s) END AS idle_since
FROM workers,
    jsonb_to_recordset(status -> 'models') AS state (
        digest text, tier text, num_bytes bigint, num_swaps integer, num_running integer, num_waiting integer,
        idle_s double precision, load_s double precision, error text)
WHERE digest = ANY ($1) AND reported_at > now() - make_interval(secs => $2) ORDER BY id;
