"""Breaks on purpose: for each promise one way to break it, and the test that must go red.

In: nothing. Out: ``BREAKS``, pure data. Never: a break that a test is expected to survive.
"""

from __future__ import annotations

from typing import NamedTuple

SCHEDULER = "orlop/scheduler/scheduler.py"
STORES = "orlop/scheduler/stores.py"
PREFIX = "orlop/scheduler/prefix.py"
REQUEST = "orlop/scheduler/request.py"
MANAGER = "orlop/tiering/manager.py"

CONTRACT = "tests/scheduler/test_contract.py::"
STORE_TESTS = "tests/scheduler/test_stores.py::"
LOAD_TESTS = "tests/scheduler/test_loads.py::"
COST_TESTS = "tests/scheduler/test_cost.py::"
LOOKUP_SCENARIOS = "tests/scenarios/test_tier_lookups.py::"
JOINT_TESTS = "tests/tiering/test_joint_stores.py::"
HOST_TIER = "orlop/host/tier.py"
SLOTS = "orlop/host/slots.py"
TURNS = "orlop/scheduler/turns.py"
SHARED_TESTS = "tests/scheduler/test_shared_jobs.py::"
TURN_TESTS = "tests/scheduler/test_turns.py::"
PREEMPTED_TESTS = "tests/scheduler/test_preempted.py::"
HOOK_TESTS = "tests/scheduler/test_review_hooks.py::"
HOST_TESTS = "tests/host/test_host_tier.py::"
GROWTH_TESTS = "tests/tiering/test_growth.py::"
WRITE_BACK = "orlop/tiering/write_back.py"
WRITE_BACK_SCENARIOS = "tests/scenarios/test_write_back.py::"
CAPACITY_SCENARIOS = "tests/scenarios/test_capacity.py::"


PLAN_LIVE = "        store_jobs += self._plan_live(urgent, scheduler_output.num_scheduled_tokens, now)\n"


class Break(NamedTuple):
    """In ``file``, the text ``old`` (there exactly once) becomes ``new``; ``test`` must fail then."""

    name: str
    file: str
    old: str
    new: str
    test: str


BREAKS = (
    Break(
        "the callback does not wait for jobs in flight",
        SCHEDULER,
        "if state.finished and not state.transfer_jobs and state.context.life not in self._owed:",
        "if state.finished and state.context.life not in self._owed:",
        CONTRACT + "test_no_offload_call_after_on_request_finished",
    ),
    Break(
        "a shutdown forgets the lives that are there",
        SCHEDULER,
        "for state in list(self._req_status.values()):",
        "for state in ():",
        CONTRACT + "test_shutdown_ends_every_life_once",
    ),
    Break(
        "a reset forgets the lives that are draining",
        SCHEDULER,
        "for state in [s for s in self._req_status.values() if s.finished]:",
        "for state in ():",
        CONTRACT + "test_reset_cache_finalizes_finished_request_with_pending_store",
    ),
    Break(
        "a reset leaves loads in flight alone",
        SCHEDULER,
        "self._current_batch_loads_to_fail.append(job.job_id)",
        "pass",
        CONTRACT + "test_a_reset_serves_nothing_from_before_and_strands_nobody",
    ),
    Break(
        "a reset leaves running requests to store what they hold",
        SCHEDULER,
        "state.tainted = state.tainted or self._holds_computed(state)",
        "pass",
        CONTRACT + "test_a_reset_serves_nothing_from_before_and_strands_nobody",
    ),
    Break(
        "jobs in flight do not count as pending work",
        SCHEDULER,
        "return bool(self._jobs or self._owed or",
        "return bool(self._owed or",
        CONTRACT + "test_flush_all_jobs_when_no_requests_remain",
    ),
    Break(
        "everything is flushed when nothing runs",
        SCHEDULER,
        "flush.update(self._fences.claim(self._current_batch_allocated_block_ids))",
        "flush.update(self._jobs)",
        CONTRACT + "test_flush_all_jobs_when_no_requests_remain",
    ),
    Break(
        "one prefix is loaded by everybody",
        SCHEDULER,
        "if self.options.prefix_caching and state.waited_for_load is None:",
        "if False:",
        CONTRACT + "test_concurrent_lookups_of_the_same_prefix",
    ),
    Break(
        "sharers wait for one load after another",
        SCHEDULER,
        "if self.options.prefix_caching and state.waited_for_load is None:",
        "if self.options.prefix_caching:",
        CONTRACT + "test_concurrent_lookups_of_the_same_prefix",
    ),
    Break(
        "an aborted load's pins are kept",
        SCHEDULER,
        "            self.manager.complete_load(reservation, now=now)\n",
        "            if not (job.lives and job.lives[0].finished):\n"
        "                self.manager.complete_load(reservation, now=now)\n",
        CONTRACT + "test_abort_loading_requests",
    ),
    Break(
        "blocks handed out to a load are not noticed",
        SCHEDULER,
        "        self._take_blocks(state, block_ids, state.asked_computed)\n",
        "        for group, ids in zip(state.groups, block_ids, strict=True):\n            group.block_ids[:] = ids\n",
        CONTRACT + "test_fence_at_update_state_after_alloc",
    ),
    Break(
        "what somebody else is loading counts as computed",
        SCHEDULER,
        "        state.load_base = state.asked_computed  #",
        "        state.load_base = None  #",
        CONTRACT + "test_what_somebody_else_has_not_filled_yet_is_not_stored",
    ),
    Break(
        "a failed load of somebody else is not heard of",
        SCHEDULER,
        "        if output.invalid_block_ids:\n",
        "        if not output:\n",
        CONTRACT + "test_stores_of_blocks_that_somebody_else_failed_to_fill_are_dropped_and_made_again",
    ),
    Break(
        "what preempted requests have computed on top of such blocks is served",
        SCHEDULER,
        "            self._leave_blocks(state)\n            state.rewind()\n",
        "            state.rewind()\n",
        "tests/scheduler/test_preempted_distrust.py::"
        "test_what_was_computed_on_top_of_unfilled_blocks_is_not_stored_although_nobody_stores_those",
    ),
    Break(
        "what requests have computed on such blocks that were resumed at once is served",
        SCHEDULER,
        "        self._leave_blocks(state)  #",
        "        pass  #",
        "tests/scheduler/test_preempted_distrust.py::"
        "test_what_was_computed_on_top_of_unfilled_blocks_is_not_stored_although_nobody_stores_those",
    ),
    Break(
        "nobody looks ahead for requests that wait",
        SCHEDULER,
        "            self._look_ahead(now)\n",
        "            pass\n",
        LOOKUP_SCENARIOS + "test_promotions_begin_while_others_use_up_the_token_budget",
    ),
    Break(
        "what was promoted ahead and has left is not waited for again",
        SCHEDULER,
        "            state.since = now  #",
        "            pass  #",
        LOOKUP_SCENARIOS + "test_a_request_is_given_its_full_wait_when_the_engine_comes_to_it",
    ),
    Break(
        "prefix hits are taken for blocks handed out",
        SCHEDULER,
        "_current_batch_allocated_block_ids.update(ids[computed // spec.tokens_per_block :])",
        "_current_batch_allocated_block_ids.update(ids)",
        CONTRACT + "test_prefix_hits_are_no_reason_for_a_fence",
    ),
    Break(
        "no fence is raised when a request ends",
        SCHEDULER,
        "self._fences.raise_for(job, job.blocks_of(state))",
        "pass",
        CONTRACT + "test_request_finished_with_pending_stores_populates_fence",
    ),
    Break(
        "the last chunk is forgotten",
        SCHEDULER,
        "        if self._planner.is_behind(state):\n"
        "            self._owed[state.context.life] = state\n"
        "        self._end",
        "        self._end",
        CONTRACT + "test_last_chunk_block_reallocated_in_the_next_step",
    ),
    Break(
        "the last chunk is read after the step",
        SCHEDULER,
        "after_compute=not at_once",
        "after_compute=True",
        CONTRACT + "test_last_chunk_block_reallocated_in_the_next_step",
    ),
    Break(
        "the last sampled token counts as computed",
        SCHEDULER,
        "tokens = min(request.num_computed_tokens - in_flight, request.num_tokens - 1)",
        "tokens = request.num_tokens",
        CONTRACT + "test_the_last_sampled_tokens_chunk_is_never_stored",
    ),
    Break(
        "tokens in flight count as computed for an abort",
        SCHEDULER,
        'in_flight = getattr(request, "num_in_flight_tokens", 0)',
        "in_flight = -1",
        CONTRACT + "test_an_abort_stores_nothing_that_is_still_in_flight",
    ),
    Break(
        "a live request's store may be read before the step",
        SCHEDULER,
        "after_compute=not at_once",
        "after_compute=lives[0].tokens_before_step == 0",
        STORE_TESTS + "test_a_block_shared_in_the_step_that_computes_it_is_stored_after_that_step",
    ),
    Break(
        "window stores are flushed in the step that makes them",
        SCHEDULER,
        "        self._flush_claimed()\n" + PLAN_LIVE,
        PLAN_LIVE + "        self._flush_claimed()\n",
        CONTRACT + "test_request_finished_with_pending_stores_populates_fence",
    ),
    Break(
        "window stores have no fence before the request ends",
        SCHEDULER,
        "if at_once or self.geometry.groups[transfer.group].sliding_window is not None:",
        "if at_once:",
        STORE_TESTS + "test_a_window_block_is_read_before_its_position_is_recycled",
    ),
    Break(
        "chunks behind the window are stored",
        STORES,
        "        if window is not None and group.cursor < stop:\n",
        "        if False:\n",
        STORE_TESTS + "test_recycled_positions_and_null_blocks_are_never_stored",
    ),
    Break(
        "a preempted request's stores are not flushed",
        SCHEDULER,
        "            self._current_batch_jobs_to_flush.update(job.job_id for job in self._stores_of(state))\n",
        "            pass\n",
        STORE_TESTS + "test_a_preempted_requests_stores_are_read_before_its_blocks_are_written",
    ),
    Break(
        "the cursor stays where it was after a preemption",
        REQUEST,
        "            group.block_ids = []\n            group.cursor = 0\n",
        "            group.cursor = len(group.hashes)\n            group.block_ids = []\n",
        STORE_TESTS + "test_the_store_cursor_goes_back_with_the_block_list",
    ),
    Break(
        "declined chunks are taken for stored",
        STORES,
        "group.cursor = plan.settled",
        "group.cursor = stop",
        STORE_TESTS + "test_declined_chunks_are_offered_again_and_leave_no_hole",
    ),
    Break(
        "settled chunks are offered again with every block",
        STORES,
        "group.cursor = plan.settled",
        "group.cursor = 0",
        COST_TESTS + "test_a_decoding_request_is_touched_once_per_block_and_its_old_keys_never",
    ),
    Break(
        "declined chunks are offered in every step",
        SCHEDULER,
        "for state in [*plan.cut, *in_prompt]}",
        "for state in [*waited, *urgent] if self._planner.is_behind(state)}",
        COST_TESTS + "test_declined_chunks_cost_one_offer_per_block_while_there_is_no_room",
    ),
    Break(
        "chunks share a reservation though what extends them may be there",
        STORES,
        " and stop == len(group.hashes)",
        "",
        "tests/scheduler/test_gathered_chains.py"
        "::test_a_chunk_that_comes_back_is_again_what_the_one_after_it_extends[lost1]",
    ),
    Break(
        "a prompt's last chunk waits for a turn where its piece needed no block",
        SCHEDULER,
        "for state in [*plan.cut, *in_prompt]}",
        "for state in plan.cut}",
        "tests/scheduler/test_last_piece.py::test_the_last_chunk_of_a_prompt_does_not_wait_for_a_turn",
    ),
    Break(
        "the first rank's report is everybody's",
        SCHEDULER,
        "            job.waiting.discard(report.rank)\n",
        "            job.waiting.clear()\n",
        STORE_TESTS + "test_a_store_that_fails_on_any_rank_publishes_nothing",
    ),
    Break(
        "a repeated report stands for another rank",
        SCHEDULER,
        "            if job is None or report.rank not in job.waiting:\n",
        "            if job is not None and report.rank not in job.waiting:\n                job.waiting.clear()\n"
        "            if job is None:\n",
        STORE_TESTS + "test_nothing_is_published_before_the_last_rank_has_reported",
    ),
    Break(
        "lost reports are waited for",
        SCHEDULER,
        "                if job.deadline > now:\n",
        "                if True:\n",
        STORE_TESTS + "test_a_lost_report_is_settled_at_its_deadline_and_its_slots_stay_retired",
    ),
    Break(
        "slots of a lost report are used again",
        SCHEDULER,
        "self._settle(job, ok=False, released=False, now=now)\n            self._store",
        "self._settle(job, ok=False, released=True, now=now)\n            self._store",
        STORE_TESTS + "test_a_lost_report_is_settled_at_its_deadline_and_its_slots_stay_retired",
    ),
    Break(
        "a failed load is tried again",
        SCHEDULER,
        "state.load_failed = True",
        "pass",
        LOAD_TESTS + "test_a_failed_load_is_computed_and_not_tried_again",
    ),
    Break(
        "a short load is taken for a whole one",
        SCHEDULER,
        "tuple(transfers), doomed=short)",
        "tuple(transfers), doomed=False)",
        LOAD_TESTS + "test_a_hit_that_is_gone_at_the_allocation_costs_a_recompute",
    ),
    Break(
        "the last token is loaded",
        SCHEDULER,
        "limit = state.req.num_tokens - 1\n",
        "limit = state.req.num_tokens\n",
        LOAD_TESTS + "test_the_last_token_is_always_computed",
    ),
    Break(
        "every ask looks everything up again",
        SCHEDULER,
        "if state.asked_computed != num_computed_tokens or state.answer is None or self._is_stale(state, now):",
        "if True:",
        LOAD_TESTS + "test_a_request_is_deferred_while_its_prefix_may_still_come",
    ),
    Break(
        "a pending chunk behind a miss is waited for",
        PREFIX,
        "tokens = missing * self._chunk_tokens",
        "if hopeful:\n                return tokens\n            tokens = missing * self._chunk_tokens",
        LOAD_TESTS + "test_window_hits_equal_those_of_a_brute_force_model",
    ),
    Break(
        "cascades do not hold their slots",
        MANAGER,
        "        self.host.hold(slots)\n        self._track(job, tier, now + self.tiers[tier].cascade_s)\n",
        "        self._track(job, tier, now + self.tiers[tier].cascade_s)\n",
        CAPACITY_SCENARIOS + "test_a_staging_tier_whose_slots_are_all_held_lets_requests_compute",
    ),
    Break(
        "a hung read's slots are given out again",
        MANAGER,
        "self._settle(job, np.zeros(len(job.order.keys), dtype=np.bool_), released=False, now=now)",
        "self._settle(job, np.zeros(len(job.order.keys), dtype=np.bool_), released=True, now=now)",
        LOOKUP_SCENARIOS + "test_a_timed_out_read_keeps_its_slots_until_it_has_let_go",
    ),
    Break(
        "a reset keeps the old namespace",
        MANAGER,
        "            self._namespace = self._namespace_of(generation)\n",
        "            pass\n",
        CAPACITY_SCENARIOS + "test_after_a_reset_no_tier_serves_bytes_of_old_weights",
    ),
    Break(
        "tiers are asked in every step",
        MANAGER,
        "        if ask is not None and (ask.covers(first) or not ask.answered):\n",
        "        if False:\n",
        LOOKUP_SCENARIOS + "test_a_tier_is_asked_once_per_request_also_where_it_has_a_part",
    ),
    Break(
        "an unanswered lookup is waited for",
        MANAGER,
        "        if not ask.answered and now >= since + self._lookup_wait_s:\n",
        "        if False:\n",
        LOOKUP_SCENARIOS + "test_a_tier_that_does_not_answer_holds_nobody_beyond_the_limit",
    ),
    Break(
        "what a tier failed to bring is asked for again",
        MANAGER,
        "                life.give_up(job.order.group, bad)\n",
        "                pass\n",
        LOOKUP_SCENARIOS + "test_a_chunk_that_cannot_be_read_is_a_miss_at_once",
    ),
    Break(
        "leases outlive their request",
        MANAGER,
        '            self.counters["surprises"] += 1\n            return\n        self._drop_wants(life)\n',
        '            self.counters["surprises"] += 1\n            return\n',
        LOOKUP_SCENARIOS + "test_an_abort_during_the_promotion_gives_the_leases_back",
    ),
    Break(
        "promoted chunks are not leased",
        MANAGER,
        "            self.host.lease(fresh)\n            life.leased = np.concatenate([life.leased, fresh])\n",
        "            pass\n",
        CAPACITY_SCENARIOS + "test_promoted_chunks_stay_until_they_are_loaded",
    ),
    Break(
        "loads take what they can get and wait for the rest",
        MANAGER,
        "        if self._lease_budget + need > cap:\n            return False\n",
        "",
        CAPACITY_SCENARIOS + "test_promotions_for_a_queue_neither_thrash_nor_starve_stores",
    ),
    Break(
        "a slot being loaded from is not held",
        MANAGER,
        "        self.host.hold(slots)\n        self.host.touch_slots(slots)\n",
        "        self.host.touch_slots(slots)\n",
        CAPACITY_SCENARIOS + "test_a_shared_chunk_stays_while_the_second_of_two_loads_reads_it",
    ),
    Break(
        "chunks that another request is writing are taken for stored",
        MANAGER,
        "settled = run.start + int(writing[0]) if len(writing) else run.stop",
        "settled = run.stop",
        CAPACITY_SCENARIOS + "test_chunks_in_flight_for_another_request_reach_the_tier_below",
    ),
    Break(
        "two requests that fill the same chunk in one step both write it",
        HOST_TIER,
        "        if len(new) < len(keys) or not table",
        "        if not table",
        JOINT_TESTS + "test_what_is_refused_changes_nothing_and_one_by_one_goes_on",
    ),
    Break(
        "a chunk that is there is written once more where it is offered with others",
        HOST_TIER,
        " or not table.keys().isdisjoint(new):",
        " or any(self.slot_state(group, key) is SlotState.RESERVED for key in new):",
        JOINT_TESTS + "test_what_is_refused_changes_nothing_and_one_by_one_goes_on",
    ),
    Break(
        "a chunk that is being written is written once more where it is offered with others",
        HOST_TIER,
        " or not table.keys().isdisjoint(new):",
        " or any(self.slot_state(group, key) is SlotState.READY for key in new):",
        JOINT_TESTS + "test_what_is_refused_changes_nothing_and_one_by_one_goes_on",
    ),
    Break(
        "a chunk is stored with the one that it extends and not linked to it",
        HOST_TIER,
        "        if not new.isdisjoint(outer):\n",
        "        if False:\n",
        JOINT_TESTS + "test_what_is_refused_changes_nothing_and_one_by_one_goes_on",
    ),
    Break(
        "the chunks of a run are not linked to each other",
        SLOTS,
        "            parent_of[slot] = before\n            reasons_of[slot] = 3\n",
        "            parent_of[slot] = -1\n            reasons_of[slot] = 2\n",
        JOINT_TESTS + "test_runs_leave_from_their_ends_and_what_they_extend_after_them",
    ),
    Break(
        "a chunk of a run does not know that another extends it",
        SLOTS,
        "            reasons_of[slot] = 3\n",
        "            reasons_of[slot] = 2\n",
        JOINT_TESTS + "test_runs_leave_from_their_ends_and_what_they_extend_after_them",
    ),
    Break(
        "of a run only the first chunk is fenced",
        REQUEST,
        "start + self.lives.count(life) * share",
        "start + share",
        SHARED_TESTS + "test_who_ends_fences_all_its_blocks_of_a_run_and_no_others",
    ),
    Break(
        "who shares a job with a distrusted life loses its run",
        SCHEDULER,
        "group.cursor = min(group.cursor, chunk)",
        "pass",
        SHARED_TESTS + "test_who_shares_a_job_with_a_distrusted_life_stores_all_its_run_again",
    ),
    Break(
        "who shares a job with a distrusted life stores only the end of its run again",
        SCHEDULER,
        "            for state, chunk in zip(job.lives, reservation.chunks.tolist(), strict=True):\n",
        "            for state, chunk in dict(zip(job.lives, reservation.chunks.tolist(), strict=True)).items():\n",
        SHARED_TESTS + "test_who_shares_a_job_with_a_distrusted_life_stores_all_its_run_again",
    ),
    Break(
        "jobs of several lives have no limit",
        STORES,
        "            if chunks > self._most_joint:\n",
        "            if False:\n",
        SHARED_TESTS + "test_no_more_share_a_job_than_allowed",
    ),
    Break(
        "a preempted request keeps its turn",
        SCHEDULER,
        "            self._learn_blocks(state)\n        jobs = self._store_at_once",
        "        jobs = self._store_at_once",
        SHARED_TESTS + "test_who_is_preempted_waits_for_no_turn",
    ),
    Break(
        "a request that has ended keeps its turn",
        SCHEDULER,
        "        self._unreached.pop(state.context.life, None)\n        self._learn_blocks(state)\n",
        "        self._unreached.pop(state.context.life, None)\n",
        SHARED_TESTS + "test_who_ends_waits_for_no_turn_and_is_owed_what_it_gathered",
    ),
    Break(
        "a reset leaves everybody their turns",
        SCHEDULER,
        "            self._learn_blocks(state)\n            state.transfer_jobs.clear()\n",
        "            state.transfer_jobs.clear()\n",
        SHARED_TESTS + "test_a_reset_outdates_runs_and_what_was_gathered",
    ),
    Break(
        "blocks that decoding requests get claim no fence",
        SCHEDULER,
        "may_claim = bool(self._owed or self._fences)",
        "may_claim = False",
        SHARED_TESTS + "test_a_block_of_a_run_that_goes_to_a_decoding_request_is_read_first",
    ),
    Break(
        "blocks that decoding requests get claim only what is owed",
        SCHEDULER,
        "may_claim = bool(self._owed or self._fences)",
        "may_claim = bool(self._owed)",
        SHARED_TESTS + "test_a_block_of_a_run_that_goes_to_a_decoding_request_is_read_first",
    ),
    Break(
        "blocks that decoding requests get do not claim what is owed",
        SCHEDULER,
        "may_claim = bool(self._owed or self._fences)",
        "may_claim = bool(self._fences)",
        SHARED_TESTS + "test_an_owed_run_is_read_before_a_decoding_request_gets_its_blocks_in_the_same_step",
    ),
    Break(
        "at its turn a request stores what it had when it began to wait",
        SCHEDULER,
        "            state.tokens_filled = computed + scheduled.get(state.context.req_id, 0)\n",
        "",
        SHARED_TESTS + "test_at_their_turn_requests_store_runs_in_one_job",
    ),
    Break(
        "all have their turn at once",
        TURNS,
        "islice(self._turns.items(), most)",
        "self._turns.items()",
        SHARED_TESTS + "test_many_that_wait_have_their_turns_in_several_steps",
    ),
    Break(
        "of many only a lot has a turn, however many wait",
        TURNS,
        "max(LOT, len(self._turns) // PARTS)",
        "LOT",
        TURN_TESTS + "test_many_have_their_turns_in_lots",
    ),
    Break(
        "who waits loses its place with every block",
        TURNS,
        "        turn[COMPUTED] = computed\n",
        "        turn[COMPUTED] = computed\n        turn[SINCE] = self._step\n"
        "        self._turns[req_id] = self._turns.pop(req_id)\n",
        TURN_TESTS + "test_who_waits_and_comes_again_keeps_its_place",
    ),
    Break(
        "a lot takes along whose time has not come",
        TURNS,
        " if turn[SINCE] <= latest]",
        "]",
        TURN_TESTS + "test_turns_are_those_of_a_naive_twin",
    ),
    Break(
        "the blocks of a long prompt are learned at some turn",
        SCHEDULER,
        "            waited.pop(state, None)\n            self._learn_blocks(state)\n",
        "            waited.pop(state, None)\n",
        SHARED_TESTS + "test_a_prompt_does_not_wait_for_the_gathering_of_others",
    ),
    Break(
        "blocks of several groups are all the first one's",
        TURNS,
        "block_id * self._groups + i for",
        "block_id * self._groups for",
        TURN_TESTS + "test_blocks_are_kept_by_group_until_they_are_taken",
    ),
    Break(
        "what was computed when a request began to wait counts for good",
        TURNS,
        "        turn[COMPUTED] = computed\n",
        "",
        TURN_TESTS + "test_the_computed_count_is_that_of_the_last_note",
    ),
    Break(
        "who does not wait is noted by whoever asks",
        TURNS,
        "        if turn is None:\n            return False\n",
        '        if turn is None:\n            turn = self._turns[req_id] = array("q", [self._step, computed])\n',
        TURN_TESTS + "test_only_who_waits_is_given_more",
    ),
    Break(
        "who has had its turn waits on",
        TURNS,
        "turn = self._turns.pop(req_id, None)",
        "turn = self._turns.get(req_id)",
        TURN_TESTS + "test_turns_are_taken_in_the_order_of_coming_and_once",
    ),
    Break(
        "beside a window turns are taken in lots",
        TURNS,
        "        if self._steps == 1:\n",
        "        if False:\n",
        SHARED_TESTS + "test_many_beside_a_sliding_window_lose_nothing_behind_it",
    ),
    Break(
        "a prompt takes everybody along who gathers",
        SCHEDULER,
        "due = self._gathered.next_step()",
        "due = list(self._gathered) if urgent else self._gathered.next_step()",
        SHARED_TESTS + "test_prompts_that_arrive_take_nobody_along_who_gathers",
    ),
    Break(
        "what is wanted at its second offer only is stored at the first with others",
        MANAGER,
        "        if self.options.store_after > 1:\n            return None\n",
        "",
        JOINT_TESTS + "test_what_is_wanted_at_its_second_offer_only_is_not_offered_together",
    ),
    Break(
        "chunks that are stored together push out what they extend",
        HOST_TIER,
        "        if not self._make_room(len(keys), [p for p in parents if p >= 0]):\n            return None\n",
        "        if not self._make_room(len(keys), []):\n            return None\n"
        "        self._books.keep([p for p in parents if p >= 0])\n",
        JOINT_TESTS + "test_what_the_offered_chunks_extend_does_not_leave_for_them",
    ),
    Break(
        "what several requests store together goes below under the salt of the first",
        MANAGER,
        "            for salt, where in _by_salt(contexts, chosen):\n",
        "            for salt, where in [(contexts[0].salt, chosen)] if chosen else ():\n",
        JOINT_TESTS + "test_each_salt_travels_in_a_job_of_its_own_with_the_lives_it_belongs_to",
    ),
    Break(
        "what a tier takes of a store of several requests is said to be everybody's",
        MANAGER,
        "theirs = contexts if everything or len(contexts) == 1 else tuple(contexts[i] for i in where)",
        "theirs = contexts",
        JOINT_TESTS + "test_lives_of_one_salt_share_a_job_and_each_is_named_beside_its_chunk",
    ),
    Break(
        "stores that end tell those who wait for them nothing",
        MANAGER,
        "        self._wake_waiters(writer)\n",
        "        pass\n",
        JOINT_TESTS + "test_who_waits_for_one_of_them_hears_of_its_end",
    ),
    Break(
        "a slot that is stored into still counts as brought up by a tier",
        MANAGER,
        "            self._brought_by[slots] = 0\n            self._touched_at[slots] = now\n",
        "            self._touched_at[slots] = now\n",
        JOINT_TESTS + "test_what_a_tier_brought_up_is_not_credited_to_it_once_the_slot_holds_another_chunk",
    ),
    Break(
        "what could not be written on eviction counts as written",
        WRITE_BACK,
        "            self._lacks[failed] |= self._bits[tier]\n",
        "            pass\n",
        WRITE_BACK_SCENARIOS + "test_what_could_not_be_written_is_tried_again_before_it_leaves",
    ),
    Break(
        "chunks that leave unwritten are not counted",
        WRITE_BACK,
        "                self.lost[tier] += int(np.count_nonzero(lacked & bit))\n",
        "                pass\n",
        WRITE_BACK_SCENARIOS + "test_a_tier_that_never_answers_costs_chunks_and_nobody_waits",
    ),
    Break(
        "the end of a process tries again what a tier refuses",
        WRITE_BACK,
        "        if gone or self._ends:\n",
        "        if gone:\n",
        WRITE_BACK_SCENARIOS + "test_the_end_tries_nothing_twice",
    ),
    Break(
        "writes on eviction have no bound",
        WRITE_BACK,
        "self._most[tier] - self.on_the_way[tier]",
        "self._most[tier] + 999",
        WRITE_BACK_SCENARIOS + "test_a_tier_that_never_answers_costs_chunks_and_nobody_waits",
    ),
    Break(
        "a reset leaves what was not written to be written",
        MANAGER,
        "        self._write_back.forget()\n",
        "",
        WRITE_BACK_SCENARIOS + "test_a_reset_forgets_what_was_not_written",
    ),
    Break(
        "what a tier has brought is written to it again",
        MANAGER,
        "        self._write_back.filled(slots)\n        self._writers[slots] = writer\n",
        "        self._writers[slots] = writer\n",
        WRITE_BACK_SCENARIOS + "test_a_slot_that_a_tier_fills_does_not_inherit_what_its_last_chunk_lacked",
    ),
    Break(
        "chunks written on eviction lose their salt",
        WRITE_BACK,
        "            self._salts.update(dict.fromkeys(slots.tolist(), salt))\n",
        "            pass\n",
        WRITE_BACK_SCENARIOS + "test_each_salt_travels_with_its_chunks",
    ),
    Break(
        "at a preemption the last token that is known counts as computed",
        SCHEDULER,
        "max(0, min(computed, state.req.num_tokens - 1))",
        "computed",
        HOOK_TESTS + "test_draft_tokens_that_were_rejected_since_its_last_block_are_not_stored_at_a_preemption",
    ),
    Break(
        "at a preemption all that is known counts as computed",
        SCHEDULER,
        "computed = self._gathered.computed(state.context.req_id)",
        "computed = state.req.num_tokens - 1",
        PREEMPTED_TESTS
        + "test_wherever_it_is_preempted_while_it_computes_its_output_again_only_what_it_has_computed_is_stored",
    ),
    Break(
        "at a preemption nothing counts as computed",
        SCHEDULER,
        "computed = self._gathered.computed(state.context.req_id)",
        "computed = 0",
        "tests/engine/test_preempted_sequences.py"
        "::test_what_decoding_filled_is_loaded_after_a_preemption_and_not_computed_again",
    ),
    Break(
        "what a preempted request has filled is read after the step",
        SCHEDULER,
        "self._store_job(lives, stores, now, at_once=True)",
        "self._store_job(lives, stores, now, at_once=lives[0].finished)",
        PREEMPTED_TESTS + "test_its_blocks_are_read_before_those_who_pushed_it_out_write_them",
    ),
    Break(
        "what a preempted request has filled raises no fence",
        SCHEDULER,
        "if at_once or self.geometry.groups[transfer.group].sliding_window is not None:",
        "if lives[0].finished or self.geometry.groups[transfer.group].sliding_window is not None:",
        PREEMPTED_TESTS + "test_its_blocks_are_read_before_those_who_pushed_it_out_write_them",
    ),
    Break(
        "fences are looked at only where something is to be flushed already",
        SCHEDULER,
        "if self._fences or self._current_batch_jobs_to_flush:",
        "if self._current_batch_jobs_to_flush:",
        PREEMPTED_TESTS + "test_its_blocks_are_read_before_those_who_pushed_it_out_write_them",
    ),
    Break(
        "what is known of a preempted request is forgotten before it is planned",
        SCHEDULER,
        "            self._learn_blocks(state)\n        jobs = self._store_at_once",
        "            self._learn_blocks(state)\n            state.rewind()\n        jobs = self._store_at_once",
        PREEMPTED_TESTS + "test_what_it_has_filled_is_stored_in_the_message_of_its_preemption",
    ),
    Break(
        "what is known of a preempted request is never forgotten",
        SCHEDULER,
        "            state.rewind()\n            self._unplanned.pop(state.context.life, None)\n        return jobs\n",
        "            self._unplanned.pop(state.context.life, None)\n        return jobs\n",
        PREEMPTED_TESTS + "test_what_could_not_be_stored_is_computed_and_stored_again",
    ),
    Break(
        "beside a window decoding gathers, and stores at a preemption",
        SCHEDULER,
        "gather_steps = 1 if any(g.sliding_window for g in geometry.groups) else self.options.gather_steps",
        "gather_steps = self.options.gather_steps",
        PREEMPTED_TESTS + "test_behind_a_sliding_window_nothing_is_read_at_a_preemption",
    ),
    Break(
        "a life that holds old bytes stores them at its preemption",
        STORES,
        "        for state in states:\n            if state.tainted:\n",
        "        for state in states:\n            if state.tainted and budget < 1 << 60:\n",
        PREEMPTED_TESTS + "test_what_was_computed_on_top_of_old_weights_is_not_stored_at_a_preemption",
    ),
    Break(
        "what was noted as computed before a block was not filled still counts",
        SCHEDULER,
        "            self._learn_blocks(self._live[req_id])\n            self._await_turn(self._live[req_id])\n",
        "            computed = self._gathered.computed(req_id)\n"
        "            self._learn_blocks(self._live[req_id])\n"
        "            self._gathered.note(req_id, tuple([] for _ in self.geometry.groups), computed)\n",
        PREEMPTED_TESTS + "test_after_blocks_were_not_filled_nothing_noted_before_is_stored",
    ),
    Break(
        "blocks that were not filled are nothing to a life that has lost them",
        SCHEDULER,
        "            if not bad.isdisjoint(job.rests_on):\n",
        "            if False:\n",
        PREEMPTED_TESTS + "test_blocks_reported_as_not_filled_one_step_late_drop_what_their_preempted_request_stored",
    ),
    Break(
        "every step is taken for one in which all decode",
        SCHEDULER,
        "all_decode = output.total_num_scheduled_tokens == len(scheduled)",
        "all_decode = True",
        PREEMPTED_TESTS + "test_what_it_computes_again_is_stored_piece_by_piece",
    ),
    Break(
        "host memory is asked how far it has grown for ever",
        MANAGER,
        "        if usable == self.host.slots:\n",
        "        if False:\n",
        GROWTH_TESTS + "test_nobody_asks_once_all_slots_are_ready",
    ),
    Break(
        "host memory that does not grow is asked how far it has grown",
        MANAGER,
        "self._grows = options.usable_slots if host.usable < host.slots else None",
        "self._grows = options.usable_slots",
        GROWTH_TESTS + "test_nobody_asks_where_all_slots_are_ready_from_the_start",
    ),
    Break(
        "host memory that has grown is taken for all of it",
        MANAGER,
        "        if usable == self.host.slots:\n",
        "        if usable > 2:\n",
        GROWTH_TESTS + "test_slots_are_used_from_the_step_on_in_which_they_are_ready",
    ),
    Break(
        "a chunk that is being written counts as readable",
        HOST_TIER,
        "np.flatnonzero(self._books.state[slots] != READY)",
        "np.flatnonzero(slots < 0)",
        HOST_TESTS + "test_the_readable_prefix_ends_before_what_is_missing_or_being_written",
    ),
    Break(
        "a chunk that is being written counts as readable where only the table is asked",
        HOST_TIER,
        "            if self._books.reserved:\n",
        "            if False:\n",
        HOST_TESTS + "test_the_readable_prefix_ends_before_what_is_missing_or_being_written",
    ),
    Break(
        "a readable prefix goes on behind what is missing in an earlier part",
        HOST_TIER,
        "            if ready < part.stop - run.start:\n",
        "            if False:\n",
        HOST_TESTS + "test_the_readable_prefix_ends_before_what_is_missing_or_being_written",
    ),
    Break(
        "readable slots go on behind what is missing in an earlier part",
        HOST_TIER,
        "            if len(found[-1]) < len(part):\n",
        "            if False:\n",
        HOST_TESTS + "test_the_readable_prefix_ends_before_what_is_missing_or_being_written",
    ),
    Break(
        "every chunk that is there is said to be readable",
        HOST_TIER,
        "SlotState(self._books.state_of[slot])",
        "SlotState.READY",
        HOST_TESTS + "test_a_chunk_is_readable_from_publish_on",
    ),
    Break(
        "what is being written is touched",
        HOST_TIER,
        "        present = self.ready_among(self.slots_of(run))\n",
        "        present = self.slots_of(run)\n        present = present[present >= 0]\n",
        HOST_TESTS + "test_what_is_being_written_is_not_touched",
    ),
    Break(
        "the key of a chunk that came to nothing stays",
        HOST_TIER,
        "            _remove(self._slot[group], self._keys_of(part.tolist()))\n",
        "            pass\n",
        HOST_TESTS + "test_single_chunks_get_what_a_reservation_gives",
    ),
)
