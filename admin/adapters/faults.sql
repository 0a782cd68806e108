-- name: faults_report
-- $1: worker id; $2: [{digest, code, message}] of all adapters that the worker could not load. Deletes the worker's
-- other faults.
WITH reported AS (
    SELECT digest, code, message FROM jsonb_to_recordset($2) AS f (digest text, code text, message text)
), gone AS (
    DELETE FROM adapter_faults WHERE worker = $1 AND digest NOT IN (SELECT digest FROM reported)
)
INSERT INTO adapter_faults AS f (digest, worker, code, message)
SELECT digest, $1, code, message FROM reported
ON CONFLICT (digest, worker) DO UPDATE SET code = excluded.code, message = excluded.message, since = now()
WHERE (f.code, f.message) IS DISTINCT FROM (excluded.code, excluded.message);

-- name: faults_forget
-- $1: ids of all present workers. Deletes the faults of other workers.
DELETE FROM adapter_faults WHERE NOT worker = ANY ($1::text[]);
