-- name: idempotency_claim
-- $1: id; $2: hash of the request; $3: nonce. Waits for a twin that is being answered. `answer` is null: it is ours to do.
INSERT INTO idempotent_requests AS r (id, request, nonce) VALUES ($1, $2, $3)
ON CONFLICT (id) DO UPDATE SET id = r.id
RETURNING request, nonce, answer;

-- name: idempotency_answer
UPDATE idempotent_requests SET answer = $2 WHERE id = $1;

-- name: idempotency_forget
DELETE FROM idempotent_requests WHERE created_at < now() - $1::interval;
