"""The files that DeepSpeed writes of a learner of one rank, by ZeRO stage; test_learner.py holds them to real ones."""

FILES = {
    0: ["mp_rank_00_model_states.pt"],
    2: ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    3: ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
}
