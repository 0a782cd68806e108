-- name: plan_each
-- For what is asked of a few or of all, in this transaction: a plan for either would read all for a few, and be kept by
-- the connection.
SELECT set_config('plan_cache_mode', 'force_custom_plan', true);
