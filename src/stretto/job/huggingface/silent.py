"""Keys of a `config.json` that do not affect what a model computes."""

_SAVED = """
model_type architectures auto_map transformers_version dtype torch_dtype _name_or_path name_or_path
attn_implementation _attn_implementation _attn_implementation_autoset _commit_hash unsloth_version
unsloth_fixed
"""
_TRAINING = """
initializer_range gradient_checkpointing output_router_logits pretraining_tp use_cache cache_implementation
output_attentions output_hidden_states return_dict torchscript tf_legacy_loss use_bfloat16 use_flash_attn
chunk_size_feed_forward tie_encoder_decoder is_decoder is_encoder_decoder cross_attention_hidden_size
"""
_TOKENS = """
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id suppress_tokens
begin_suppress_tokens forced_bos_token_id forced_eos_token_id prefix tokenizer_class bad_words_ids n_ctx
"""
_GENERATION = """
do_sample temperature top_k top_p typical_p num_beams num_beam_groups num_return_sequences repetition_penalty
length_penalty diversity_penalty early_stopping max_length min_length no_repeat_ngram_size output_scores
encoder_no_repeat_ngram_size return_dict_in_generate remove_invalid_values exponential_decay_length_penalty
"""
_TASKS = """
task_specific_params problem_type finetuning_task id2label label2id num_labels summary_type summary_use_proj
summary_activation summary_proj_to_labels summary_first_dropout
"""
_VISION = """
vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id
image_token_id
"""
_T5 = """
initializer_factor classifier_dropout dense_act_fn is_gated_act output_past num_hidden_layers
"""
# Stretto's models have one dropout rate, which is not applied to activations
_BART = """
attention_dropout activation_dropout classifier_dropout classif_dropout encoder_layerdrop decoder_layerdrop
init_std add_bias_logits extra_pos_embeddings num_hidden_layers output_past force_bos_token_to_be_generated
"""
SILENT = frozenset(f"{_SAVED} {_TRAINING} {_TOKENS} {_GENERATION} {_TASKS}".split())
VISION = frozenset(_VISION.split())  # of multimodal models, in addition to their language model's
T5, BART = frozenset(_T5.split()), frozenset(_BART.split())
