"""The test that shows what each option of vLLM does here, of those that the engine does not get.

``test_vllm_arguments`` compares this with ``HANDLED_HERE``, and looks the tests up.
"""

from __future__ import annotations

from typing import Final

_LISTEN: Final = "tests/integration/test_ways_to_listen.py"
_HTTP: Final = "tests/integration/test_http_options.py"
_SERVED: Final = "tests/e2e/test_serve_options.py"
_ORIGINS: Final = f"{_HTTP}::test_pages_of_allowed_origins_may_ask_and_read_every_answer"
_FILTERED: Final = f"{_HTTP}::test_methods_and_headers_of_pages_are_limited"
_DOCS: Final = f"{_HTTP}::test_documentation_is_served_unless_it_is_disabled"
_LOG: Final = f"{_HTTP}::test_requests_to_named_routes_or_all_are_left_out_of_the_log"
_HEADS: Final = f"{_HTTP}::test_heads_have_the_limits_that_are_given"
_CONTENT: Final = f"{_SERVED}::test_requests_and_answers_are_logged_without_their_content"
_FORM: Final = f"{_SERVED}::test_answers_have_the_chosen_role_fingerprint_and_form_of_tokens"
_TEMPLATE: Final = f"{_SERVED}::test_the_chat_template_its_defaults_and_the_form_of_contents"
_CALLS: Final = f"{_SERVED}::test_a_call_is_found_by_the_chosen_parser"
_USAGE: Final = f"{_SERVED}::test_usage_is_told_with_cached_tokens_and_times"
_FILE: Final = f"{_SERVED}::test_a_file_of_options_names_the_model_its_names_and_a_key"
_ADDRESS: Final = "tests/unit/app/test_vllm_arguments.py::test_a_file_of_options_says_where_to_listen"
_TLS: Final = f"{_LISTEN}::test_over_tls"

SHOWN_BY: Final = {
    "allow_credentials": _ORIGINS,
    "allowed_headers": _FILTERED,
    "allowed_methods": _FILTERED,
    "allowed_origins": _ORIGINS,
    "anthropic_disabled_thinking_effort": f"{_SERVED}::test_messages_without_thinking_have_the_chosen_effort",
    "api_key": "tests/integration/test_given_keys.py::test_each_key_opens_everything_but_administration",
    "chat_template": _TEMPLATE,
    "chat_template_content_format": _TEMPLATE,
    "config": _FILE,
    "default_chat_template_kwargs": _TEMPLATE,
    "disable_access_log_for_endpoints": _LOG,
    "disable_fastapi_docs": _DOCS,
    "disable_uvicorn_access_log": _LOG,
    "enable_auto_tool_choice": _CALLS,
    "enable_force_include_usage": _USAGE,
    "enable_log_deltas": _CONTENT,
    "enable_log_outputs": _CONTENT,
    "enable_offline_docs": _DOCS,
    "enable_per_request_metrics": _USAGE,
    "enable_prompt_tokens_details": _USAGE,
    "enable_request_id_headers": f"{_HTTP}::test_an_answer_has_the_id_of_its_request_if_that_is_enabled",
    "enable_server_load_tracking": f"{_SERVED}::test_the_load_counts_what_is_under_way",
    "enable_ssl_refresh": f"{_HTTP}::test_a_new_certificate_is_served_without_a_restart",
    "enable_tokenizer_info_endpoint": f"{_SERVED}::test_the_tokenizer_is_described_if_that_is_enabled",
    "exclude_tools_when_tool_choice_none": (
        f"{_SERVED}::test_tools_are_left_out_of_the_prompt_if_none_may_be_called"
    ),
    "fingerprint_mode": _FORM,
    "fingerprint_value": _FORM,
    "h11_max_header_count": _HEADS,
    "h11_max_incomplete_event_size": _HEADS,
    "help": "tests/unit/app/test_cli.py::test_without_a_command_it_shows_its_usage_and_fails",
    "host": _ADDRESS,
    "log_error_stack": f"{_SERVED}::test_errors_are_logged_where_they_were_raised_if_that_is_enabled",
    "lora_modules": "tests/e2e/test_lora_http.py::test_an_adapter_is_a_model_of_the_list",
    "max_log_len": _CONTENT,
    "middleware": f"{_HTTP}::test_an_operators_middleware_sees_every_answer_the_last_one_outermost",
    "model_tag": "tests/unit/app/test_cli.py::test_the_model_comes_first_or_as_an_option_or_not_at_all",
    "port": _ADDRESS,
    "response_role": _FORM,
    "return_tokens_as_token_ids": _FORM,
    "root_path": f"{_LISTEN}::test_below_a_prefix_whether_or_not_a_proxy_strips_it",
    "sse_keep_alive_interval": (
        "tests/integration/test_keep_alive.py"
        "::test_a_stream_has_comments_before_its_first_event_and_between_events"
    ),
    "ssl_ca_certs": f"{_LISTEN}::test_clients_need_a_certificate_if_that_is_required",
    "ssl_cert_reqs": f"{_LISTEN}::test_clients_need_a_certificate_if_that_is_required",
    "ssl_certfile": _TLS,
    "ssl_ciphers": f"{_LISTEN}::test_only_the_chosen_ciphers_are_offered",
    "ssl_keyfile": _TLS,
    "tool_call_parser": _CALLS,
    "tool_parser_plugin": f"{_SERVED}::test_a_plugin_brings_a_parser",
    "tool_strict_level": (
        f"{_SERVED}::test_the_arguments_of_a_call_follow_its_schema_at_the_strictest_level"
    ),
    "trust_request_chat_template": (
        f"{_SERVED}::test_a_request_may_bring_its_template_only_if_that_is_trusted"
    ),
    "trust_request_mm_kwargs": f"{_SERVED}::test_arguments_of_processors_are_taken_only_if_they_are_trusted",
    "uds": f"{_LISTEN}::test_over_a_unix_socket",
    "uvicorn_log_level": f"{_HTTP}::test_the_level_of_uvicorn_is_raised",
}
"""By option: file and function."""
FOR_THE_ENGINE: Final = {
    "enable_log_requests": _CONTENT,
    "log_level": _CONTENT,
    "reasoning_parser": f"{_SERVED}::test_thoughts_are_told_apart_by_the_chosen_parser",
    "served_model_name": _FILE,
}
"""The same for options that the engine gets and clients notice."""
