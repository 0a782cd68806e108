-- name: worker_list
-- $1: id of the previous page's last worker; $2: limit; $3: id of the only worker to return, or null. `status` is null
-- if no gateway has reported the worker yet.
SELECT {columns of admin.workers.workers.Worker}, leased_until IS NOT NULL AS is_registered,
       coalesce(extract(epoch FROM now() - reported_at), 0)::double precision AS age_s
FROM workers WHERE id > $1 AND ($3::text IS NULL OR id = $3) ORDER BY id LIMIT $2;

-- name: worker_set_draining
UPDATE workers SET draining = $2 WHERE id = $1;

-- name: worker_register
-- $1: id; $2: address; $3: seconds of the lease.
INSERT INTO workers (id, address, leased_until) VALUES ($1, $2, now() + make_interval(secs => $3))
ON CONFLICT (id) DO UPDATE SET address = excluded.address, leased_until = excluded.leased_until;

-- name: worker_renew
-- $1: id; $2: seconds of the lease. Returns null if the worker is not registered or its registration has ended.
UPDATE workers SET leased_until = now() + make_interval(secs => $2) WHERE id = $1 AND leased_until IS NOT NULL
RETURNING true;

-- name: worker_leave
DELETE FROM workers WHERE id = $1;

-- name: workers_report
-- $1: gateway id; $2: [{id, address, status}], each id once. If several gateways report a worker, only the gateway that
-- wrote the last report updates it, until that report is 1.5 seconds old, so that each status is written once.
INSERT INTO workers AS w (id, address, status, reported_at, reported_by)
SELECT id, address, status, now(), $1 FROM jsonb_to_recordset($2) AS r (id text, address text, status jsonb) ORDER BY id
ON CONFLICT (id) DO UPDATE
SET status = excluded.status, failure = '', reported_at = excluded.reported_at, reported_by = excluded.reported_by
WHERE w.reported_by = excluded.reported_by OR w.reported_at < now() - interval '1.5 seconds' OR w.reported_at IS NULL;

-- name: workers_gone
-- Returns whether there are workers that have had neither a valid lease nor a report for $1 seconds.
SELECT EXISTS (
    SELECT FROM workers WHERE greatest(leased_until, reported_at, registered_at) < now() - make_interval(secs => $1));

-- name: workers_forget
DELETE FROM workers WHERE greatest(leased_until, reported_at, registered_at) < now() - make_interval(secs => $1);

-- name: workers_not_reached
-- $1: [{address, failure}] of workers that a gateway cannot reach. Ignores workers that another gateway has reported in
-- the last 1.5 seconds.
UPDATE workers AS w SET failure = left(r.failure, 512)
FROM jsonb_to_recordset($1) AS r (address text, failure text)
WHERE w.id IN (
        SELECT id FROM workers
        WHERE address IN (SELECT f.address FROM jsonb_to_recordset($1) AS f (address text))
            AND (reported_at IS NULL OR reported_at < now() - interval '1.5 seconds')
        ORDER BY id FOR UPDATE SKIP LOCKED)
    AND w.address = r.address AND w.failure IS DISTINCT FROM left(r.failure, 512);
