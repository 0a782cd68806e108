-- name: idempotency_claim
-- $1: id; $2: hash of the request; $3: nonce to store in a new row. Waits while another transaction executes a request
-- with the same id. If the returned `answer` is null, the caller must execute the request.
INSERT INTO idempotent_requests AS r (id, request, nonce) VALUES ($1, $2, $3)
ON CONFLICT (id) DO UPDATE SET id = r.id
RETURNING request, nonce, answer;

-- name: idempotency_answer
UPDATE idempotent_requests SET answer = $2 WHERE id = $1;

-- name: idempotency_forget
DELETE FROM idempotent_requests WHERE created_at < now() - $1::interval;
