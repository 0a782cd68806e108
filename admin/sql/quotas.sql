-- name: quota_exchange
-- $1: gateway id; $2: seconds that its slices outlive it; $3: the limits, as the function takes them.
SELECT place, total, granted, remaining, unanswered, call
FROM quota_exchange($1, make_interval(secs => $2), $3) ORDER BY place;

-- name: quota_release
-- $1: gateways that are gone, and all of whose usage is loaded.
DELETE FROM quota_holders WHERE gateway_id = ANY ($1::text[]);

-- name: quota_upkeep
SELECT quota_upkeep();
