/*
 * Exchange, fence, streaming with relays, waiting and giving up, as a model for Spin. See
 * docs/dev/protocol.md. Names are the code's: of ultraep_serve/balance/host/fabric.py (exchange, stream,
 * wait_slots, _wait, _require_peers), ultraep_kernels/host/exchange.py (post_row, gather_rows),
 * host/stream.py (stream_chunks) and host/relays.py (relay_parents). With DEVICE it is their twins
 * on a GPU: ultraep_kernels/device/exchange.py, stream.py and _signals.py.
 *
 * Each step (one line that is not in a d_step) is atomic; the ranks' steps mix in every order, and
 * a rank may die before any of them. A copy takes two steps, so that half a copy can be seen.
 *
 * NUM_RANKS 2 or 3. FAULT: 0 none, 1 one rank dies, 2 one rank stops (SIGSTOP) for ever.
 * IMPATIENT: whoever waits may find the time over at any moment, as if others were slow; else only
 * when nothing else can happen. STAYING: copies stay in slots of the layer, and the last rank's
 * experts change once, which it says in its row. MISTAKE_...: a seeded mistake, which the model must
 * find.
 */
#ifndef NUM_RANKS
#define NUM_RANKS 2
#endif
#ifndef FAULT
#define FAULT 0
#endif
#ifndef NUM_CHUNKS
#define NUM_CHUNKS 1
#endif
#define NUM_SLOTS 2
#ifndef NUM_PLANS
#define NUM_PLANS 6 /* of those in make_plans, the first ones */
#endif
#define NUM_EPOCHS 3 /* with a plan; a last exchange without one follows */
#define NUM_PLACES (NUM_RANKS * NUM_SLOTS) /* place = rank * S + slot, as in `parents` */
#define PRIMARY 0 /* its row says what to do, which stands for the loads that all plan from */
#define NONE 255
#define TORN 254 /* a copy has begun */

#if NUM_RANKS == 2
#define NUM_MASTERS 2
#define ANY_RANK(f) (f(0) || f(1))
#define ALL_RANKS(f) (f(0) && f(1))
#define ANY_PLACE(f) (f(0) || f(1) || f(2) || f(3))
#define ALL_PLACES(f) (f(0) && f(1) && f(2) && f(3))
#else
#define NUM_MASTERS 1
#define ANY_RANK(f) (f(0) || f(1) || f(2))
#define ALL_RANKS(f) (f(0) && f(1) && f(2))
#define ANY_PLACE(f) (f(0) || f(1) || f(2) || f(3) || f(4) || f(5))
#define ALL_PLACES(f) (f(0) && f(1) && f(2) && f(3) && f(4) && f(5))
#endif

#ifdef DEVICE /* every rank has an inbox: a flag and two rows of each sender */
#define NUM_INBOXES NUM_RANKS
#define FLAG(owner, sender) ((owner) * NUM_RANKS + (sender))
#define PAUSE_OVER(behind) false /* a kernel does not see processes */
#else /* a rank's flag and its two rows are in its own segment, where the others read them */
#define NUM_INBOXES 1
#define FLAG(owner, sender) (sender)
#define PAUSE_OVER(behind) HOPELESS(behind)
#endif
#ifdef MISTAKE_ONE_ROW
#define ROW(owner, sender, epoch) FLAG(owner, sender)
#else
#define ROW(owner, sender, epoch) (((epoch) % 2) * NUM_INBOXES * NUM_RANKS + FLAG(owner, sender))
#endif

byte flags[NUM_INBOXES * NUM_RANKS];
byte rows[2 * NUM_INBOXES * NUM_RANKS]; /* epoch * NUM_PLANS + choice */
byte chunk_flags[NUM_PLACES * NUM_CHUNKS];
byte pools[NUM_PLACES * NUM_CHUNKS]; /* STAMP of what a chunk of a slot holds */
bool alive[NUM_RANKS]; /* is_process_alive */
bool computing[NUM_RANKS]; /* the expert kernel reads this rank's slots */
#ifdef DEVICE
bool status[NUM_RANKS]; /* a bit of TIMEOUTS is set: what this rank computes is void, it will end */
#define VOID(r) status[r]
#else
#define VOID(r) false
#endif
#define READS(r) (computing[r] && alive[r] && !VOID(r))
#ifdef STAYING
#define SPEAKS_OF_CHANGES (NUM_RANKS - 1)
byte changed; /* the epoch in which its experts did, 0 not yet */
#endif
byte stopped = NONE;
bool faulty;
hidden byte slot_expert[6 * NUM_PLACES];
hidden byte parents[6 * NUM_PLACES]; /* NONE: the master */

#define EXPERT(place) slot_expert[choice * NUM_PLACES + (place)]
#define PARENT(place) parents[choice * NUM_PLACES + (place)]
#define CHUNK(place, chunk) ((place) * NUM_CHUNKS + (chunk))
#define STAMP(expert) (epoch * 8 + (expert))
#define SENDER(place) (PARENT(place) == NONE -> EXPERT(place) / NUM_MASTERS : PARENT(place) / NUM_SLOTS)

/* ---- plans: what the planner could return. Digit r to the base 7: the slots of rank r. */

inline fill_slots(plan, r, digit) { /* the others' experts: one, or both, in either order */
	first = plan * NUM_PLACES + r * NUM_SLOTS;
	one = (r == 0 -> NUM_MASTERS : 0);
	two = one + 1 + (NUM_RANKS == 3 && r == 1 -> 1 : 0);
	slot_expert[first] = ((digit) == 1 || (digit) == 5 -> one : ((digit) == 3 || (digit) == 6 -> two : NONE));
	slot_expert[first + 1] = ((digit) == 2 || (digit) == 6 -> one : ((digit) == 4 || (digit) == 5 -> two : NONE))
}

inline relay_parents(plan) { /* mode "always": the first replica relays to the second */
	for (place : 0 .. NUM_PLACES - 1) {
		parents[plan * NUM_PLACES + place] = NONE;
		for (other : 0 .. NUM_PLACES - 1) {
			if
			:: other < place && slot_expert[plan * NUM_PLACES + place] != NONE &&
			   slot_expert[plan * NUM_PLACES + other] == slot_expert[plan * NUM_PLACES + place] ->
				parents[plan * NUM_PLACES + place] = other
#ifdef MISTAKE_RELAYS_IN_A_CIRCLE
			:: other > place && slot_expert[plan * NUM_PLACES + place] != NONE &&
			   slot_expert[plan * NUM_PLACES + other] == slot_expert[plan * NUM_PLACES + place] ->
				parents[plan * NUM_PLACES + place] = other
#endif
			:: else
			fi
		}
	}
}

inline make_plans() {
	fill_slots(0, 0, 0); fill_slots(0, 1, 0); /* nothing moves */
	fill_slots(1, 0, 0); fill_slots(1, 1, 1); /* one expert, to all others */
	fill_slots(2, 0, 5); fill_slots(2, 1, 5); /* all slots */
	fill_slots(3, 0, 6); fill_slots(3, 1, 6); /* all slots, the other way round */
	fill_slots(4, 0, 3); fill_slots(4, 1, 6); /* some */
	fill_slots(5, 0, 1); fill_slots(5, 1, 4); /* one each, not all in the same slot */
#if NUM_RANKS == 3
	fill_slots(0, 2, 0); fill_slots(1, 2, 1); fill_slots(2, 2, 5);
	fill_slots(3, 2, 6); fill_slots(4, 2, 0); fill_slots(5, 2, 2);
#endif
	for (plan : 0 .. NUM_PLANS - 1) { relay_parents(plan) }
}

/* ---- what is waited for: the rows, a chunk to forward, this rank's slots */

#define EXCHANGE 0
#define RELAY 1
#define SLOTS 2
#define IS_DONE(what) (what == EXCHANGE -> ALL_POSTED : (what == RELAY -> CAN_GO_ON : ALL_ARRIVED))

#define POSTED(r) (flags[FLAG(me, r)] >= epoch)
#define ALL_POSTED ALL_RANKS(POSTED)

#ifdef MISTAKE_RELAY_DOES_NOT_WAIT
#define THERE(place) true
#else /* a master, or a chunk that has arrived in this rank's slot */
#define THERE(place) (PARENT(place) == NONE || chunk_flags[CHUNK(PARENT(place), progress[place])] >= epoch)
#endif
#define TO_SEND(place) (EXPERT(place) != NONE && SENDER(place) == me && progress[place] < NUM_CHUNKS)
#define READY(place) (TO_SEND(place) && THERE(place))

#define CAN_GO_ON (ANY_PLACE(READY) || !ANY_PLACE(TO_SEND))

#define CHUNK_ARRIVED(place, chunk) (chunk_flags[CHUNK(place, chunk)] >= epoch)
#if NUM_CHUNKS == 1
#define ARRIVED(place) (EXPERT(place) == NONE || CHUNK_ARRIVED(place, 0))
#define RIGHT(place) (EXPERT(place) == NONE || pools[CHUNK(place, 0)] == STAMP(EXPERT(place)))
#else
#define ARRIVED(place) (EXPERT(place) == NONE || (CHUNK_ARRIVED(place, 0) && CHUNK_ARRIVED(place, 1)))
#define RIGHT(place) (EXPERT(place) == NONE || (pools[CHUNK(place, 0)] == STAMP(EXPERT(place)) && pools[CHUNK(place, 1)] == STAMP(EXPERT(place))))
#endif
#define ALL_ARRIVED (ARRIVED(me * NUM_SLOTS) && ARRIVED(me * NUM_SLOTS + 1))

/* ---- waiting and giving up */

#define BEHIND(r) (POSTED(r) -> 0 : 1 << (r))
#if NUM_RANKS == 2
#define ALL_BEHIND (BEHIND(0) + BEHIND(1))
#else
#define ALL_BEHIND (BEHIND(0) + BEHIND(1) + BEHIND(2))
#endif
#define IS_BEHIND(behind, r) ((behind) == 0 || (((behind) >> (r)) & 1))
#if NUM_RANKS == 2
#define HOPELESS(behind) ((!alive[0] && IS_BEHIND(behind, 0)) || (!alive[1] && IS_BEHIND(behind, 1)))
#else
#define HOPELESS(behind) ((!alive[0] && IS_BEHIND(behind, 0)) || (!alive[1] && IS_BEHIND(behind, 1)) || (!alive[2] && IS_BEHIND(behind, 2)))
#endif
#ifdef IMPATIENT
#define OUT_OF_TIME true
#else
#define OUT_OF_TIME timeout
#endif

/* PeerTimeoutError, with which the process ends; a kernel sets a bit of the status and goes on */
inline give_up() {
#ifndef IMPATIENT
	assert(faulty); /* nobody gives up where no rank has died or stopped */
#endif
#ifdef DEVICE
	status[me] = true
#else
	alive[me] = false
#endif
}

/* Looks whether others are alive, the last time at what is waited for. Those that have not posted
   are suspects; it may have looked at them long ago (behind) or now (ALL_BEHIND). */
inline wait(what) {
#ifdef DEVICE
	if
	:: VOID(me) && !IS_DONE(what) /* looks once */
	:: !VOID(me) && !IS_DONE(what) && OUT_OF_TIME -> give_up()
	:: IS_DONE(what)
	fi
#else
	if
	:: IS_DONE(what)
	:: else ->
		behind = ALL_BEHIND;
		if
		:: IS_DONE(what)
#ifndef MISTAKE_NOBODY_LOOKS_WHO_DIED
		:: HOPELESS(behind) || HOPELESS(ALL_BEHIND) -> require_peers(what)
#endif
#if FAULT == 2 || defined(IMPATIENT)
		:: OUT_OF_TIME -> require_peers(what)
#endif
		fi;
		behind = 0
	fi
#endif
}

inline require_peers(what) {
	if
#ifndef MISTAKE_NO_LAST_LOOK
	:: IS_DONE(what) /* it may have answered before it ended */
	:: else -> give_up()
#else
	:: give_up()
#endif
	fi
}

/* ---- exchange */

inline post_row() {
	if
	:: me == PRIMARY && epoch <= NUM_EPOCHS ->
#ifdef MISTAKE_POSTED_BEFORE_COMPUTED
		choice = 2
#else
		atomic { select(choice : 0 .. NUM_PLANS - 1) }
#endif
#ifdef STAYING
	:: me == SPEAKS_OF_CHANGES && changed == 0 ->
		if
		:: choice = 0
		:: d_step { changed = epoch; choice = 1 } /* FORGET */
		fi
#endif
	:: else -> choice = 0
	fi;
	peer = 0;
	do
	:: peer < NUM_INBOXES ->
#ifdef MISTAKE_FLAG_BEFORE_ROW
		flags[FLAG(peer, me)] = epoch;
#endif
		rows[ROW(peer, me, epoch)] = TORN;
		rows[ROW(peer, me, epoch)] = epoch * NUM_PLANS + choice;
#ifndef MISTAKE_FLAG_BEFORE_ROW
		flags[FLAG(peer, me)] = epoch;
#endif
		peer++
	:: else -> break
	od;
	peer = 0
}

#ifdef MISTAKE_PLAN_FROM_OWN_ROW
#define SPEAKER me
#else
#define SPEAKER PRIMARY
#endif

inline gather_rows() {
	choice = 0;
	do
	:: peer < NUM_RANKS -> d_step {
#ifdef DEVICE
		if
		:: VOID(me) -> /* garbage, from which nothing is planned */
#ifdef MISTAKE_PLAN_AFTER_GIVING_UP
			choice = (peer == PRIMARY -> rows[ROW(me, peer, epoch)] % NUM_PLANS : choice)
#else
			skip
#endif
		:: else ->
#endif
			assert(rows[ROW(me, peer, epoch)] / NUM_PLANS == epoch); /* its row has arrived whole */
			if
			:: peer == SPEAKER -> choice = rows[ROW(me, peer, epoch)] % NUM_PLANS
#ifdef STAYING
#ifndef MISTAKE_FORGET_IS_LOST
			:: peer == SPEAKS_OF_CHANGES && peer != SPEAKER && rows[ROW(me, peer, epoch)] % NUM_PLANS == 1 ->
				held[0] = 0; held[1] = 0
#endif
#endif
			:: else
			fi;
#ifdef DEVICE
		fi;
#endif
		peer++ }
	:: else -> break
	od;
	peer = 0
}

inline exchange() {
#ifdef MISTAKE_EPOCH_REUSED
	if
	:: epoch == 2 && !again -> again = true
	:: else -> epoch++
	fi;
#else
	epoch++;
#endif
#ifdef DEVICE
#ifndef MISTAKE_POST_AFTER_GIVING_UP
	if
	:: !VOID(me) -> post_row() /* who has given up says nothing any more */
	:: else
	fi;
#else
	post_row();
#endif
#else
	post_row();
#endif
#ifndef MISTAKE_FENCE_LEFT_OUT
	wait(EXCHANGE);
#endif
	gather_rows()
}

/* ---- stream */

/* What is forwarded must be there before the copy and after it. */
#define SOURCE_IS_RIGHT(place) (PARENT(place) == NONE || pools[CHUNK(PARENT(place), progress[place])] == STAMP(EXPERT(place)))

inline send(place) {
	d_step {
		assert(SOURCE_IS_RIGHT(place));
		assert(!READS((place) / NUM_SLOTS)); /* not overwritten while read */
#ifdef MISTAKE_FLAG_BEFORE_DATA
		chunk_flags[CHUNK(place, progress[place])] = epoch;
#endif
		pools[CHUNK(place, progress[place])] = TORN
	};
	d_step {
		assert(SOURCE_IS_RIGHT(place));
		assert(!READS((place) / NUM_SLOTS));
		pools[CHUNK(place, progress[place])] = STAMP(EXPERT(place))
	};
	d_step {
#ifndef MISTAKE_FLAG_BEFORE_DATA
		chunk_flags[CHUNK(place, progress[place])] = epoch;
#endif
		progress[place] = progress[place] + 1
	}
}

/* In any order: the device has a program for each of several sends. */
inline stream_chunks() {
	do
	:: READY(0) -> send(0)
	:: READY(1) -> send(1)
	:: READY(2) -> send(2)
	:: READY(3) -> send(3)
#if NUM_RANKS == 3
	:: READY(4) -> send(4)
	:: READY(5) -> send(5)
#endif
	:: !ANY_PLACE(READY) ->
		wait(RELAY);
		if
#ifdef MISTAKE_FORWARD_AFTER_GIVING_UP
		:: !ANY_PLACE(READY) && ANY_PLACE(TO_SEND) -> send(NUM_PLACES - 1); break
		:: !ANY_PLACE(TO_SEND) -> break
#else
		:: !ANY_PLACE(READY) -> break /* done, or on the device given up: not forwarded */
#endif
		:: else
		fi
	od;
	place = 0;
	d_step { for (place : 0 .. NUM_PLACES - 1) { progress[place] = 0 } place = 0 }
}

/* ---- wait_slots, and what the engine does with the slots */

inline wait_slots() {
#ifdef MISTAKE_NOBODY_WAITS_FOR_SLOTS
	skip
#else
	wait(SLOTS)
#endif
}

#ifdef STAYING /* also what was copied in an epoch before, and is not what the experts were */
#define EXPERT_OF(stamp) ((stamp) % 8)
#define IS_STALE(stamp) (changed <= epoch && (stamp) / 8 < changed && EXPERT_OF(stamp) / NUM_MASTERS == SPEAKS_OF_CHANGES)
#define STAYED(slot) (held[slot] == 0 || (pools[CHUNK(me * NUM_SLOTS + (slot), 0)] == held[slot] && !IS_STALE(held[slot])))
#define SLOTS_ARE_RIGHT (VOID(me) || (STAYED(0) && STAYED(1)))
#ifdef MISTAKE_REPLACED_COPY_IS_READ
#define TAKE(slot) (held[slot] == 0 && EXPERT(me * NUM_SLOTS + (slot)) != NONE -> STAMP(EXPERT(me * NUM_SLOTS + (slot))) : held[slot])
#else
#define TAKE(slot) (EXPERT(me * NUM_SLOTS + (slot)) != NONE -> STAMP(EXPERT(me * NUM_SLOTS + (slot))) : held[slot])
#endif
#else
#define SLOTS_ARE_RIGHT (VOID(me) || (RIGHT(me * NUM_SLOTS) && RIGHT(me * NUM_SLOTS + 1)))
#endif

inline compute() {
#ifdef STAYING
	d_step { held[0] = TAKE(0); held[1] = TAKE(1); assert(SLOTS_ARE_RIGHT); computing[me] = true };
	d_step { assert(SLOTS_ARE_RIGHT); computing[me] = false }
#else
	d_step { assert(SLOTS_ARE_RIGHT); computing[me] = true };
	d_step {
		assert(SLOTS_ARE_RIGHT);
		computing[me] = false;
		for (place : me * NUM_SLOTS * NUM_CHUNKS .. (me + 1) * NUM_SLOTS * NUM_CHUNKS - 1) {
			pools[place] = 0 /* poisoned, as the tests do */
		}
		place = 0
	}
#endif
}

/* ---- HostBalancer.route and the layer's computation, once per epoch */

proctype rank(byte me) {
	byte epoch, choice, peer, behind, place;
	byte progress[NUM_PLACES];
#ifdef STAYING
	byte held[NUM_SLOTS]; /* STAMP of what is in this rank's slots, 0 nothing */
#endif
#ifdef MISTAKE_EPOCH_REUSED
	bool again;
#endif
	{
		do
		:: epoch < NUM_EPOCHS ->
			exchange();
#ifdef MISTAKE_FLAGS_ARE_RESET
			d_step { for (place : me * NUM_SLOTS * NUM_CHUNKS .. (me + 1) * NUM_SLOTS * NUM_CHUNKS - 1) { chunk_flags[place] = 0 } place = 0 }
#endif
			stream_chunks();
			wait_slots();
#ifdef MISTAKE_POSTED_BEFORE_COMPUTED
			if
			:: epoch < NUM_EPOCHS -> rows[ROW(0, me, epoch + 1)] = (epoch + 1) * NUM_PLANS + (me == PRIMARY -> 2 : 0)
			:: else
			fi;
			flags[FLAG(0, me)] = epoch + 1;
#endif
			compute();
			choice = 0
#ifdef DEVICE
		:: VOID(me) -> alive[me] = false /* check_peers: the host has noticed */
#endif
		:: else -> break
		od;
		exchange();
		alive[me] = false /* leaves: everybody has answered */
	} unless { !alive[me] || stopped == me }
}

active proctype fault() {
#if FAULT == 1
	byte victim;
	select(victim : 0 .. NUM_RANKS - 1);
	atomic { if :: alive[victim] -> faulty = true; alive[victim] = false :: else fi }
#elif FAULT == 2
	byte victim;
	select(victim : 0 .. NUM_RANKS - 1);
	atomic { faulty = true; stopped = victim }
#else
	skip
#endif
}

init {
	byte plan, place, other, first, one, two;
	atomic {
		d_step {
			make_plans();
			for (place : 0 .. NUM_RANKS - 1) { alive[place] = true }
			plan = 0; place = 0; other = 0; first = 0; one = 0; two = 0
		}
		for (place : 0 .. NUM_RANKS - 1) { run rank(place) }
	}
}
