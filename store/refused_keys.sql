-- name: audit_refused_keys
-- $1: [{key_id, tenant_id, address, request_id, details}], at most 100.
SELECT audit_refused_keys($1);
