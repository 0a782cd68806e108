--
-- PostgreSQL database dump
--

\restrict m0hr1IYXqhG4k5VforV021f4qRNzgOTRBLqVL5SDMXaXJtRQbDzUWLLx1VQ7S3E

-- Dumped from database version 18.6
-- Dumped by pg_dump version 18.6

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET transaction_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

--
-- Data for Name: adapter_faults; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: adapter_proofs; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.adapter_proofs VALUES
	('223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267', 'bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141', '2-2x7-float32-rn', '2e72bed3cf57bea85b9f9455d1d61239eed7b3d48f0ca34b5ca31581877347da', '{"effect": 0.8588733673095703, "tokens": [91, 52, 139, 221, 262, 122, 65, 140], "logprobs": [-4.502196311950684, -4.637340068817139, -4.64928674697876, -4.682456970214844, -4.688659191131592, -4.737961769104004, -4.7539262771606445, -4.811574459075928]}', 'worker-e9d781c09e3d', '2026-11-26 18:49:55.668949+00'),
	('2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb', 'bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141', '2-2x7-float32-rn', '9f6e648846ba878f2b1394e2d31b1766398ae7e5a1c9db0a80c5391263df6843', '{"effect": 1.167914867401123, "tokens": [248, 236, 198, 187, 96, 133, 51, 256], "logprobs": [-4.560629844665527, -4.571072578430176, -4.61417293548584, -4.632850646972656, -4.658093452453613, -4.67520809173584, -4.692050933837891, -4.7163496017456055]}', 'worker-e9d781c09e3d', '2026-11-26 18:49:56.176823+00'),
	('725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630', 'bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141', '2-2x7-float32-rn', 'd89d989a57d3a0e0179a719b7d0b5012b1937a1ff68951ec8953f4cd6c487ca7', '{"effect": 0.6198439598083496, "tokens": [248, 51, 149, 217, 120, 46, 256, 104], "logprobs": [-4.426097869873047, -4.551389217376709, -4.65529727935791, -4.6861371994018555, -4.688595294952393, -4.706362724304199, -4.729817867279053, -4.7416791915893555]}', 'worker-e9d781c09e3d', '2026-11-26 18:49:56.756536+00');


--
-- Data for Name: tenants; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.tenants VALUES
	('ten_2Fq2gT0eF1u5', 'acme', NULL, '2026-11-26 18:49:53.379917+00', 0, false),
	('ten_x5DhOnMsQH8m', 'globex', NULL, '2026-11-26 18:49:53.791916+00', 0, false);


--
-- Data for Name: adapters; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.adapters VALUES
	('ten_2Fq2gT0eF1u5', 'bot', 2, '2026-11-26 18:49:55.355927+00'),
	('ten_x5DhOnMsQH8m', 'helper', 1, '2026-11-26 18:49:56.64429+00');


--
-- Data for Name: base_models; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.base_models VALUES
	('tiny', 'bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141', '{"digest": "bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141", "linears": [], "head_dim": 16, "num_heads": 2, "model_type": "llama", "num_layers": 2, "rotary_dim": 0, "vocab_size": 264, "hidden_size": 32, "num_kv_heads": 1, "intermediate_size": 48, "tie_word_embeddings": false}', 2048, '2026-11-26 18:49:51.044888+00', 'auto', 'bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141');


--
-- Data for Name: signing_keys; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: adapter_versions; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.adapter_versions VALUES
	('ten_2Fq2gT0eF1u5', 'bot', 1, 'ready', '223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267', 'tiny', '{"digest": "223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267", "layers": [0, 1], "max_rank": 2, "warnings": [], "file_bytes": 7397, "base_digest": "bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141", "equals_base": false, "projections": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "num_parameters": 1856, "invocation_tokens": []}', NULL, '2026-11-26 18:49:55.355927+00', '{}', NULL, 'mostFVZDA72z', 19, NULL, NULL, NULL, NULL, NULL),
	('ten_2Fq2gT0eF1u5', 'bot', 2, 'ready', '2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb', 'tiny', '{"digest": "2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb", "layers": [0, 1], "max_rank": 2, "warnings": [], "file_bytes": 7397, "base_digest": "bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141", "equals_base": false, "projections": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "num_parameters": 1856, "invocation_tokens": []}', NULL, '2026-11-26 18:49:56.036026+00', '{}', NULL, 'mostFVZDA72z', 28, NULL, NULL, NULL, NULL, NULL),
	('ten_x5DhOnMsQH8m', 'helper', 1, 'ready', '725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630', 'tiny', '{"digest": "725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630", "layers": [0, 1], "max_rank": 2, "warnings": [], "file_bytes": 7397, "base_digest": "bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141", "equals_base": false, "projections": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "num_parameters": 1856, "invocation_tokens": []}', NULL, '2026-11-26 18:49:56.64429+00', '{}', NULL, 'mostFVZDA72z', 38, NULL, NULL, NULL, NULL, NULL);


--
-- Data for Name: alias_history; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.alias_history OVERRIDING SYSTEM VALUE VALUES
	(1, 'ten_2Fq2gT0eF1u5', 'bot', 'prod', 1, NULL, 'mostFVZDA72z', '2026-11-26 18:49:55.668949+00', NULL, NULL, 'first', NULL),
	(2, 'ten_2Fq2gT0eF1u5', 'bot', 'beta', 2, NULL, 'mostFVZDA72z', '2026-11-26 18:49:56.176823+00', NULL, NULL, 'upload', NULL),
	(3, 'ten_x5DhOnMsQH8m', 'helper', 'prod', 1, NULL, 'mostFVZDA72z', '2026-11-26 18:49:56.756536+00', NULL, NULL, 'first', NULL);


--
-- Data for Name: aliases; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.aliases VALUES
	('ten_2Fq2gT0eF1u5', 'bot', 'prod', 1, NULL, false, 1),
	('ten_2Fq2gT0eF1u5', 'bot', 'beta', 2, NULL, false, 2),
	('ten_x5DhOnMsQH8m', 'helper', 'prod', 1, NULL, false, 3);


--
-- Data for Name: api_keys; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.api_keys VALUES
	('mostFVZDA72z', NULL, 'serve', '\x83f8008e47d7360597d9d2dada7ec2957c3930918e18bbffe05db132dd69a695', '{admin}', NULL, NULL, '2026-11-26 18:49:51.015961+00', NULL, NULL, NULL, NULL, NULL),
	('cQGcLqKXt57e', 'ten_2Fq2gT0eF1u5', 'test', '\xf1bce319b9506c4daa36ff8bc7424ac5111e6b75c7eb14b771065dbbf5864d83', '{adapters:write,inference,usage:read}', NULL, NULL, '2026-11-26 18:49:53.499785+00', NULL, NULL, NULL, NULL, NULL),
	('f7gjRpmHq6xa', 'ten_x5DhOnMsQH8m', 'test', '\x57caa2be57771450f48d85dec0e000e24f0a19346e9ece1ac799e335286b62a0', '{adapters:write,inference,usage:read}', NULL, NULL, '2026-11-26 18:49:53.917076+00', NULL, NULL, NULL, NULL, NULL),
	('Uw2qS4mv4fCz', 'ten_2Fq2gT0eF1u5', 'revoked', '\x1307e9e1631437446b283e4e6b9bdb83c0ec1e236bb493602c4eb4b523a2819a', '{adapters:write,inference,usage:read}', NULL, '2026-11-26 18:49:54.781294+00', '2026-11-26 18:49:54.555907+00', NULL, NULL, NULL, NULL, NULL);


--
-- Data for Name: approved_templates; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: audit_log; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.audit_log VALUES
	(1, '2026-11-26 18:49:51.02846+00', 'system', NULL, 'key.create', 'mostFVZDA72z', '{"id": "mostFVZDA72z", "name": "serve", "cidrs": null, "family": null, "models": null, "scopes": ["admin"], "replaces": null, "tenant_id": null, "created_at": "2026-11-26T18:49:51.015961+00:00", "expires_at": null, "not_before": null, "revoked_at": null}', NULL, '\x0000000000000000000000000000000000000000000000000000000000000000', '\x0a61224f26bd9e4e2776340e927042f6cb16cbd375d232c40f5455192d52ed78', NULL),
	(2, '2026-11-26 18:49:51.079606+00', 'system', NULL, 'model.create', 'tiny', '{"name": "tiny", "digest": "bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141", "source": "bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141", "residency": "auto", "created_at": "2026-11-26T18:49:51.044888+00:00", "max_model_len": 2048}', NULL, '\x0a61224f26bd9e4e2776340e927042f6cb16cbd375d232c40f5455192d52ed78', '\xb6b3582cbb7844378369055d251d7f253ee4704ba2fe1a8a5d6af4e7fc411de1', NULL),
	(3, '2026-11-26 18:49:53.407069+00', 'mostFVZDA72z', 'ten_2Fq2gT0eF1u5', 'tenant.create', 'ten_2Fq2gT0eF1u5', '{"id": "ten_2Fq2gT0eF1u5", "name": "acme", "pin_bytes": 0, "created_at": "2026-11-26T18:49:53.379917+00:00", "sharing_group": null, "require_signature": false}', 'req_5cee89227e1a49dbb5ff5e5e8886997b', '\xb6b3582cbb7844378369055d251d7f253ee4704ba2fe1a8a5d6af4e7fc411de1', '\x2f20a3d21a88edb3f6089c4cb161247a0052c305b651ff887d342fc6e8ee4403', '127.0.0.1'),
	(4, '2026-11-26 18:49:53.51099+00', 'mostFVZDA72z', 'ten_2Fq2gT0eF1u5', 'key.create', 'cQGcLqKXt57e', '{"id": "cQGcLqKXt57e", "name": "test", "cidrs": null, "family": null, "models": null, "scopes": ["adapters:write", "inference", "usage:read"], "replaces": null, "tenant_id": "ten_2Fq2gT0eF1u5", "created_at": "2026-11-26T18:49:53.499785+00:00", "expires_at": null, "not_before": null, "revoked_at": null}', 'req_c5e6e07469714a8eb083e0e668add68f', '\x2f20a3d21a88edb3f6089c4cb161247a0052c305b651ff887d342fc6e8ee4403', '\xe6f9a103c37b94587fd8e44424297dd2c451c31ecc444153a3222448c60734c5', '127.0.0.1'),
	(5, '2026-11-26 18:49:53.792868+00', 'mostFVZDA72z', 'ten_x5DhOnMsQH8m', 'tenant.create', 'ten_x5DhOnMsQH8m', '{"id": "ten_x5DhOnMsQH8m", "name": "globex", "pin_bytes": 0, "created_at": "2026-11-26T18:49:53.791916+00:00", "sharing_group": null, "require_signature": false}', 'req_ca48946af7004061b5a2ea47cfd092fc', '\xe6f9a103c37b94587fd8e44424297dd2c451c31ecc444153a3222448c60734c5', '\x8e90101cb2b94ce456b2d99ec2ff3aa6366705c2ea7599a542d16f4787e3a170', '127.0.0.1'),
	(6, '2026-11-26 18:49:53.924109+00', 'mostFVZDA72z', 'ten_x5DhOnMsQH8m', 'key.create', 'f7gjRpmHq6xa', '{"id": "f7gjRpmHq6xa", "name": "test", "cidrs": null, "family": null, "models": null, "scopes": ["adapters:write", "inference", "usage:read"], "replaces": null, "tenant_id": "ten_x5DhOnMsQH8m", "created_at": "2026-11-26T18:49:53.917076+00:00", "expires_at": null, "not_before": null, "revoked_at": null}', 'req_8a2040a4d2154a8586ff92e2b31ef7c0', '\x8e90101cb2b94ce456b2d99ec2ff3aa6366705c2ea7599a542d16f4787e3a170', '\x273ebb8ef51bf8c094fb4c2bbeff7d076e958ac104b727c15bff5c0b9d44e423', '127.0.0.1'),
	(7, '2026-11-26 18:49:54.233576+00', 'mostFVZDA72z', 'ten_2Fq2gT0eF1u5', 'quota.create', 'ten_2Fq2gT0eF1u5', '{"class": "standard", "key_id": null, "weight": 1, "subject": "ten_2Fq2gT0eF1u5", "adapters": null, "tenant_id": "ten_2Fq2gT0eF1u5", "adapter_bytes": null, "cached_weight": 100, "spend_per_day": null, "tokens_per_day": 1000000, "spend_per_month": 100000000000000, "tokens_per_month": null, "tokens_per_minute": null, "concurrent_requests": null, "requests_per_minute": 1000}', 'req_51754d4d33f44204a42ad473dd0f3758', '\x273ebb8ef51bf8c094fb4c2bbeff7d076e958ac104b727c15bff5c0b9d44e423', '\x15cf12c2160b2336cb2d15e1a4ea3901716e9962ada737b6becb4ffe76e5b73c', '127.0.0.1'),
	(8, '2026-11-26 18:49:54.341206+00', 'mostFVZDA72z', NULL, 'price.create', 'tiny', '{"input": 250000, "model": "tiny", "output": 1500000, "cached_input": 50000}', 'req_ea071383915e4477a59a5cf7f13a877c', '\x15cf12c2160b2336cb2d15e1a4ea3901716e9962ada737b6becb4ffe76e5b73c', '\x66ad8a3f53e5adbb2598715d74455e166ab899754937f9f5e2e33fde921b5337', '127.0.0.1'),
	(9, '2026-11-26 18:49:54.561605+00', 'mostFVZDA72z', 'ten_2Fq2gT0eF1u5', 'key.create', 'Uw2qS4mv4fCz', '{"id": "Uw2qS4mv4fCz", "name": "revoked", "cidrs": null, "family": null, "models": null, "scopes": ["adapters:write", "inference", "usage:read"], "replaces": null, "tenant_id": "ten_2Fq2gT0eF1u5", "created_at": "2026-11-26T18:49:54.555907+00:00", "expires_at": null, "not_before": null, "revoked_at": null}', 'req_c55cf066e58744aab1aa60a9e56641b2', '\x66ad8a3f53e5adbb2598715d74455e166ab899754937f9f5e2e33fde921b5337', '\x2fe1726233ffc7bc9320167977fc4e268941ec6a203d7e26fc75d6bd49c5e8a3', '127.0.0.1'),
	(10, '2026-11-26 18:49:54.800845+00', 'mostFVZDA72z', 'ten_2Fq2gT0eF1u5', 'key.revoke', 'Uw2qS4mv4fCz', '{"revoked_at": [null, "2026-11-26T18:49:54.781294+00:00"]}', 'req_cb44be0a6bc74fd18025808fbad955a0', '\x2fe1726233ffc7bc9320167977fc4e268941ec6a203d7e26fc75d6bd49c5e8a3', '\xbaaa4e9f709064a09bf7158447d96b5174835177c6100d294d48a57dd78c472d', '127.0.0.1'),
	(11, '2026-11-26 18:49:55.362009+00', 'mostFVZDA72z', 'ten_2Fq2gT0eF1u5', 'adapter.create', 'bot', '{"name": "bot", "tenant_id": "ten_2Fq2gT0eF1u5", "created_at": "2026-11-26T18:49:55.355927+00:00"}', 'req_e2d74633d765445880f98b64918e288a', '\xbaaa4e9f709064a09bf7158447d96b5174835177c6100d294d48a57dd78c472d', '\x10e0de9b106d438f28bb1f86d0e49cb0655cf3f5e1c25a735fee5c5ce5b21480', '127.0.0.1'),
	(12, '2026-11-26 18:49:55.408088+00', 'mostFVZDA72z', 'ten_2Fq2gT0eF1u5', 'version.create', 'bot@1', '{"name": "bot", "error": null, "state": "proving", "digest": "223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267", "version": 1, "base_name": "tiny", "signature": null, "signed_by": null, "tenant_id": "ten_2Fq2gT0eF1u5", "created_at": "2026-11-26T18:49:55.355927+00:00", "expires_at": null, "retired_at": null, "uploaded_by": "mostFVZDA72z", "wanted_alias": null}', 'req_e2d74633d765445880f98b64918e288a', '\x10e0de9b106d438f28bb1f86d0e49cb0655cf3f5e1c25a735fee5c5ce5b21480', '\x85f1e6925287090a65cddfc34cc7ae82bbfe93e682c28c322e51552f61763340', '127.0.0.1'),
	(13, '2026-11-26 18:49:55.682277+00', 'system', 'ten_2Fq2gT0eF1u5', 'version.ready', 'bot@1', '{"state": ["proving", "ready"]}', NULL, '\x85f1e6925287090a65cddfc34cc7ae82bbfe93e682c28c322e51552f61763340', '\x4ed424411974526e1adc3caf23cb6bfa458d9896fc7958515478dec823bd68dc', NULL),
	(14, '2026-11-26 18:49:55.693767+00', 'system', 'ten_2Fq2gT0eF1u5', 'alias.first', 'bot@prod', '{"name": "bot", "alias": "prod", "canary": null, "detail": null, "policy": null, "reason": "first", "version": 1, "previous": null, "tenant_id": "ten_2Fq2gT0eF1u5", "changed_by": "mostFVZDA72z"}', NULL, '\x4ed424411974526e1adc3caf23cb6bfa458d9896fc7958515478dec823bd68dc', '\xa18d95d5d45cc719f428cb57cce32fe655b98c00f65e1ce395c080774746c54f', NULL),
	(15, '2026-11-26 18:49:56.049232+00', 'mostFVZDA72z', 'ten_2Fq2gT0eF1u5', 'version.create', 'bot@2', '{"name": "bot", "error": null, "state": "proving", "digest": "2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb", "version": 2, "base_name": "tiny", "signature": null, "signed_by": null, "tenant_id": "ten_2Fq2gT0eF1u5", "created_at": "2026-11-26T18:49:56.036026+00:00", "expires_at": null, "retired_at": null, "uploaded_by": "mostFVZDA72z", "wanted_alias": "beta"}', 'req_38ba97e32220416e8ea54815a26dbec7', '\xa18d95d5d45cc719f428cb57cce32fe655b98c00f65e1ce395c080774746c54f', '\x07e4dbc323f093677d54bbe05c352e032df0039109609f348c7d5a2562f683b1', '127.0.0.1'),
	(16, '2026-11-26 18:49:56.178322+00', 'system', 'ten_2Fq2gT0eF1u5', 'version.ready', 'bot@2', '{"state": ["proving", "ready"]}', NULL, '\x07e4dbc323f093677d54bbe05c352e032df0039109609f348c7d5a2562f683b1', '\x5a13df3357d47dedc65fd0b70854bcf041e24285f6865c8e87bbb3f2b8a6d4db', NULL),
	(17, '2026-11-26 18:49:56.179222+00', 'system', 'ten_2Fq2gT0eF1u5', 'alias.upload', 'bot@beta', '{"name": "bot", "alias": "beta", "canary": null, "detail": null, "policy": null, "reason": "upload", "version": 2, "previous": null, "tenant_id": "ten_2Fq2gT0eF1u5", "changed_by": "mostFVZDA72z"}', NULL, '\x5a13df3357d47dedc65fd0b70854bcf041e24285f6865c8e87bbb3f2b8a6d4db', '\x23db06e205b70ffcafae2ff28efe102cc7e4c36cfc979659c427e55c6c68ceb0', NULL),
	(18, '2026-11-26 18:49:56.193852+00', 'system', 'ten_2Fq2gT0eF1u5', 'version.update', 'bot@2', '{"wanted_alias": ["beta", null]}', NULL, '\x23db06e205b70ffcafae2ff28efe102cc7e4c36cfc979659c427e55c6c68ceb0', '\x26376742ab15b291f28e3bba345bd1aee927cf69c8157b8f9759b6196df41851', NULL),
	(19, '2026-11-26 18:49:56.645299+00', 'mostFVZDA72z', 'ten_x5DhOnMsQH8m', 'adapter.create', 'helper', '{"name": "helper", "tenant_id": "ten_x5DhOnMsQH8m", "created_at": "2026-11-26T18:49:56.64429+00:00"}', 'req_e3ca97eb05ff4d7eb8f8ffa6bbf3f6dd', '\x26376742ab15b291f28e3bba345bd1aee927cf69c8157b8f9759b6196df41851', '\x9fbb4e78dce871abfcb99f804f78c1fa0be6f44bd92b29b1a24dfc79ec9388d0', '127.0.0.1'),
	(21, '2026-11-26 18:49:56.757931+00', 'system', 'ten_x5DhOnMsQH8m', 'version.ready', 'helper@1', '{"state": ["proving", "ready"]}', NULL, '\xd69e92061d1dc45bdd53c0e1ccb3bb7c39fd5bbf2cc394cf292bef28452353c2', '\xe763b5ef791785c4a0c4ae92953f219738b3bd1d69c1a03525b8fa6ccc0bd807', NULL),
	(20, '2026-11-26 18:49:56.646936+00', 'mostFVZDA72z', 'ten_x5DhOnMsQH8m', 'version.create', 'helper@1', '{"name": "helper", "error": null, "state": "proving", "digest": "725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630", "version": 1, "base_name": "tiny", "signature": null, "signed_by": null, "tenant_id": "ten_x5DhOnMsQH8m", "created_at": "2026-11-26T18:49:56.64429+00:00", "expires_at": null, "retired_at": null, "uploaded_by": "mostFVZDA72z", "wanted_alias": null}', 'req_e3ca97eb05ff4d7eb8f8ffa6bbf3f6dd', '\x9fbb4e78dce871abfcb99f804f78c1fa0be6f44bd92b29b1a24dfc79ec9388d0', '\xd69e92061d1dc45bdd53c0e1ccb3bb7c39fd5bbf2cc394cf292bef28452353c2', '127.0.0.1'),
	(22, '2026-11-26 18:49:56.758683+00', 'system', 'ten_x5DhOnMsQH8m', 'alias.first', 'helper@prod', '{"name": "helper", "alias": "prod", "canary": null, "detail": null, "policy": null, "reason": "first", "version": 1, "previous": null, "tenant_id": "ten_x5DhOnMsQH8m", "changed_by": "mostFVZDA72z"}', NULL, '\xe763b5ef791785c4a0c4ae92953f219738b3bd1d69c1a03525b8fa6ccc0bd807', '\x1443b58e88ee9126ea185e7b65bd761eda536bc771343b01dea40f642d156c6d', NULL);


--
-- Data for Name: canary_targets; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: catalog_changes; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.catalog_changes VALUES
	('ten_x5DhOnMsQH8m', 7, ''),
	('ten_2Fq2gT0eF1u5', 14, ''),
	('ten_2Fq2gT0eF1u5', 33, 'bot'),
	('ten_x5DhOnMsQH8m', 40, 'helper');


--
-- Data for Name: catalog_generation; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.catalog_generation VALUES
	(true, 42);


--
-- Data for Name: gateways; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.gateways VALUES
	('gateway-vm-4d309bbaf5b3', 42, '{}', '2026-11-26 18:49:52.916359+00', '2026-11-26 18:49:57.901107+00');


--
-- Data for Name: gateway_load; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.gateway_load VALUES
	('gateway-vm-4d309bbaf5b3', '2026-11-26 18:49:57.02093+00', '{"errors": [], "models": [], "seconds": 5.2247802120036795, "tenants": [], "refusals": {}, "requests_in_flight": 0}');


--
-- Data for Name: idempotent_requests; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: key_uses; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: loose_contents; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: prices; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.prices VALUES
	('tiny', 250000, 50000, 1500000, '2026-11-26 18:49:54.333768+00');


--
-- Data for Name: quota_holders; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.quota_holders VALUES
	('', '-infinity', 'infinity', 0, '[]'),
	('gateway-vm-4d309bbaf5b3', '2026-11-26 18:49:57.958968+00', '2026-11-26 18:54:57.958968+00', 9, '[{"call": 0, "granted": 500, "remaining": 500, "unanswered": 0}]');


--
-- Data for Name: quota_leases; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.quota_leases VALUES
	('ten_2Fq2gT0eF1u5', 'requests_per_minute', '2026-11-26 18:49:00+00', 'gateway-vm-4d309bbaf5b3', 500, 0),
	('ten_2Fq2gT0eF1u5', 'requests_per_minute', '2026-11-26 18:50:00+00', 'gateway-vm-4d309bbaf5b3', 500, 0),
	('ten_2Fq2gT0eF1u5', 'spend_per_month', '2026-11-01 00:00:00+00', 'gateway-vm-4d309bbaf5b3', 49999960250000, 0),
	('ten_2Fq2gT0eF1u5', 'tokens_per_day', '2026-11-26 00:00:00+00', 'gateway-vm-4d309bbaf5b3', 499961, 0);


--
-- Data for Name: quotas; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.quotas VALUES
	('ten_2Fq2gT0eF1u5', 'ten_2Fq2gT0eF1u5', NULL, 1000, NULL, NULL, 1000000, NULL, NULL, 100000000000000, NULL, NULL, 100, '2026-11-26 18:49:54.206061+00', 1, 'standard');


--
-- Data for Name: rejected_uploads; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: schema_migrations; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.schema_migrations VALUES
	(1, '0001_pre_baseline.sql', 'c6c1e99a2e64a0d74b0682432737fdff1a079adb7e462c07698e2c5aca6429f7', '2026-11-26 18:49:50.296733+00');


--
-- Data for Name: usage_20261126; Type: TABLE DATA; Schema: public; Owner: loraplex
--

-- load via partition root public.usage

INSERT INTO public.usage VALUES
	('2026-11-26', 'req_92c365558506528dcc863d83e958d8c1', '2026-11-26 18:49:57.694994+00', 'ten_x5DhOnMsQH8m', 'f7gjRpmHq6xa', 'tiny', 'helper', 1, 5, 0, 8, 35.53, 68.008, '{length}', 'worker-e9d781c09e3d', NULL, 'completed', 'gateway-vm-4d309bbaf5b3', 13, 13250000, 1250000, 0, 12000000),
	('2026-11-26', 'req_c33c391d19d1c2635f144b42c51df27d', '2026-11-26 18:49:57.500317+00', 'ten_2Fq2gT0eF1u5', 'cQGcLqKXt57e', 'tiny', 'bot', 2, 5, 0, 8, 16.18, 60.411, '{length}', 'worker-e9d781c09e3d', NULL, 'completed', 'gateway-vm-4d309bbaf5b3', 13, 13250000, 1250000, 0, 12000000),
	('2026-11-26', 'req_c9dc44044975d2d3ed06a821d3a1b97e', '2026-11-26 18:49:57.161187+00', 'ten_2Fq2gT0eF1u5', 'cQGcLqKXt57e', 'tiny', NULL, NULL, 5, 0, 8, 90.138, 121.345, '{length}', 'worker-e9d781c09e3d', NULL, 'completed', 'gateway-vm-4d309bbaf5b3', 13, 13250000, 1250000, 0, 12000000),
	('2026-11-26', 'req_f15b3d1714d31e8fd0b1e145e233a799', '2026-11-26 18:49:57.336382+00', 'ten_2Fq2gT0eF1u5', 'cQGcLqKXt57e', 'tiny', 'bot', 1, 5, 0, 8, 27.909, 46.064, '{length}', 'worker-e9d781c09e3d', NULL, 'completed', 'gateway-vm-4d309bbaf5b3', 13, 13250000, 1250000, 0, 12000000);


--
-- Data for Name: usage_20261127; Type: TABLE DATA; Schema: public; Owner: loraplex
--

-- load via partition root public.usage



--
-- Data for Name: usage_20261128; Type: TABLE DATA; Schema: public; Owner: loraplex
--

-- load via partition root public.usage



--
-- Data for Name: usage_credits; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: usage_hourly; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.usage_hourly VALUES
	('2026-11-26 18:00:00+00', 'ten_2Fq2gT0eF1u5', 'tiny', '', 'cQGcLqKXt57e', 1, 5, 0, 8, 0, 13, 13250000, 1250000, 0, 12000000, 0),
	('2026-11-26 18:00:00+00', 'ten_2Fq2gT0eF1u5', 'tiny', 'bot', 'cQGcLqKXt57e', 1, 5, 0, 8, 1, 13, 13250000, 1250000, 0, 12000000, 0),
	('2026-11-26 18:00:00+00', 'ten_2Fq2gT0eF1u5', 'tiny', 'bot', 'cQGcLqKXt57e', 1, 5, 0, 8, 2, 13, 13250000, 1250000, 0, 12000000, 0),
	('2026-11-26 18:00:00+00', 'ten_x5DhOnMsQH8m', 'tiny', 'helper', 'f7gjRpmHq6xa', 1, 5, 0, 8, 1, 13, 13250000, 1250000, 0, 12000000, 0);


--
-- Data for Name: usage_kept; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.usage_kept VALUES
	(true, '2026-08-29');


--
-- Data for Name: usage_totals; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.usage_totals VALUES
	('cQGcLqKXt57e', 'day', '2026-11-26', 39, 39750000),
	('cQGcLqKXt57e', 'month', '2026-11-01', 39, 39750000),
	('f7gjRpmHq6xa', 'day', '2026-11-26', 13, 13250000),
	('f7gjRpmHq6xa', 'month', '2026-11-01', 13, 13250000),
	('ten_2Fq2gT0eF1u5', 'day', '2026-11-26', 39, 39750000),
	('ten_2Fq2gT0eF1u5', 'month', '2026-11-01', 39, 39750000),
	('ten_x5DhOnMsQH8m', 'day', '2026-11-26', 13, 13250000),
	('ten_x5DhOnMsQH8m', 'month', '2026-11-01', 13, 13250000);


--
-- Data for Name: version_outcomes; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: version_proofs; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.version_proofs VALUES
	('ten_2Fq2gT0eF1u5', 'bot', 1, 'bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141', '2-2x7-float32-rn', '2e72bed3cf57bea85b9f9455d1d61239eed7b3d48f0ca34b5ca31581877347da', '{"effect": 0.8588733673095703, "tokens": [91, 52, 139, 221, 262, 122, 65, 140], "logprobs": [-4.502196311950684, -4.637340068817139, -4.64928674697876, -4.682456970214844, -4.688659191131592, -4.737961769104004, -4.7539262771606445, -4.811574459075928]}', 'worker-e9d781c09e3d', '2026-11-26 18:49:55.668949+00'),
	('ten_2Fq2gT0eF1u5', 'bot', 2, 'bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141', '2-2x7-float32-rn', '9f6e648846ba878f2b1394e2d31b1766398ae7e5a1c9db0a80c5391263df6843', '{"effect": 1.167914867401123, "tokens": [248, 236, 198, 187, 96, 133, 51, 256], "logprobs": [-4.560629844665527, -4.571072578430176, -4.61417293548584, -4.632850646972656, -4.658093452453613, -4.67520809173584, -4.692050933837891, -4.7163496017456055]}', 'worker-e9d781c09e3d', '2026-11-26 18:49:56.176823+00'),
	('ten_x5DhOnMsQH8m', 'helper', 1, 'bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141', '2-2x7-float32-rn', 'd89d989a57d3a0e0179a719b7d0b5012b1937a1ff68951ec8953f4cd6c487ca7', '{"effect": 0.6198439598083496, "tokens": [248, 51, 149, 217, 120, 46, 256, 104], "logprobs": [-4.426097869873047, -4.551389217376709, -4.65529727935791, -4.6861371994018555, -4.688595294952393, -4.706362724304199, -4.729817867279053, -4.7416791915893555]}', 'worker-e9d781c09e3d', '2026-11-26 18:49:56.756536+00');


--
-- Data for Name: version_proving; Type: TABLE DATA; Schema: public; Owner: loraplex
--



--
-- Data for Name: workers; Type: TABLE DATA; Schema: public; Owner: loraplex
--

INSERT INTO public.workers VALUES
	('worker-e9d781c09e3d', 'unix:/tmp/tmpgynrnqdq/data/socket/worker.sock', '2026-11-26 18:49:53.914494+00', NULL, NULL, '{"step": 38, "type": "status", "models": [{"itl": [[0.01, 16], [0.025, 5]], "name": "tiny", "tier": "device", "error": "", "digest": "bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141", "idle_s": 0.0, "load_s": 0.038025419002224226, "num_bytes": 282240, "num_swaps": 1, "pages_free": 261659, "num_running": 1, "num_waiting": 0, "pages_total": 261664, "max_num_seqs": 64, "pages_cached": 4, "adapter_loads": {"host": 3, "device": 3}, "decode_step_s": 0.005386633038728452, "adapter_load_s": {"host": 0.08722853800281882, "device": 0.00249808299849974}, "num_preemptions": 0, "prefix_hit_tokens": 0, "num_waiting_tokens": 0, "prefill_tokens_per_s": 308102.07730637956, "num_adapter_evictions": 0, "prefix_queried_tokens": 597, "num_integrity_failures": 0, "num_failed_adapter_loads": 0}], "extents": "wk.................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................a", "tenants": [{"tenant": "ten_2Fq2gT0eF1u5", "kv_bytes": 0, "adapter_bytes": 131072}, {"tenant": "ten_x5DhOnMsQH8m", "kv_bytes": 4096, "adapter_bytes": 65536}, {"tenant": "", "kv_bytes": 16384, "adapter_bytes": 0}], "adapters": [{"name": "bot@1", "tier": "device", "error": "", "digest": "223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267", "leases": 0, "pinned": false, "message": "", "num_bytes": 65536}, {"name": "bot@2", "tier": "device", "error": "", "digest": "2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb", "leases": 0, "pinned": false, "message": "", "num_bytes": 65536}, {"name": "helper@1", "tier": "device", "error": "", "digest": "725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630", "leases": 1, "pinned": false, "message": "", "num_bytes": 65536}], "draining": false, "settings": {"ops": "cpu", "dtype": "float32", "store": "/tmp/tmpgynrnqdq/data/store", "device": "cpu", "health": "unix:/tmp/tmpgynrnqdq/data/socket/worker-health.sock", "listen": "unix:/tmp/tmpgynrnqdq/data/socket/worker.sock", "memory": "1073741824", "models": "{''tiny'': ''bb5be8afc5a74c913de3d055b13fda885e38fcb378d7fd0285ef50766726d141''}", "drain_s": "120.0", "threads": "1", "security": "Security(tls=None, insecure=False, gateways=(), workers=())", "cache_dir": "/tmp/tmpgynrnqdq/data/cache", "log_level": "info", "log_format": "text", "max_queued": "1024", "runs_ahead": "None", "uses_graphs": "None", "max_num_seqs": "64", "adapter_cache": "17179869184", "device_memory": "None", "keeps_weights": "False", "max_lora_rank": "256", "max_model_len": "None", "max_token_gap": "0.25", "kernel_variant": "avx512bf16", "max_queue_wait": "150.0", "max_model_wait_s": "30.0", "host_model_memory": "None", "max_model_drain_s": "10.0", "max_queued_tokens": "1048576", "adapter_memory_max": "None", "adapter_memory_min": "0", "max_batched_tokens": "512", "host_adapter_memory": "1073741824", "max_loaded_adapters": "128"}, "generation": 42, "arena_bytes": 1074003968, "instance_id": "worker-e9d781c09e3d", "tokens_per_s": 9.721598297007892, "num_late_kernels": 0, "num_cached_adapters": 3, "cached_adapter_bytes": 24384}', '2026-11-26 18:49:57.972826+00', 'gateway-vm-4d309bbaf5b3', '');


--
-- Name: alias_history_id_seq; Type: SEQUENCE SET; Schema: public; Owner: loraplex
--

SELECT pg_catalog.setval('public.alias_history_id_seq', 3, true);


--
-- Name: quota_calls; Type: SEQUENCE SET; Schema: public; Owner: loraplex
--

SELECT pg_catalog.setval('public.quota_calls', 1, false);


--
-- Name: rejected_uploads_id_seq; Type: SEQUENCE SET; Schema: public; Owner: loraplex
--

SELECT pg_catalog.setval('public.rejected_uploads_id_seq', 1, false);


--
-- PostgreSQL database dump complete
--

\unrestrict m0hr1IYXqhG4k5VforV021f4qRNzgOTRBLqVL5SDMXaXJtRQbDzUWLLx1VQ7S3E

