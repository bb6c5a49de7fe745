/*
 * What one host says of itself to another, and what the other makes of it, as a model for Spin. See
 * docs/dev/protocol.md. Names are the code's: of ultraep_serve/balance/watch.py (look, close),
 * ultraep_serve/balance/host_link.py (receive) and ultraep_serve/launcher/supervisor.py
 * (_say_stopped, _say_lost).
 *
 * The host that speaks has a launcher and two ranks. The network, or whoever owns it, delivers each
 * datagram never, once or often, in any order, and makes up its own. MISTAKE_...: a seeded mistake,
 * which the model must find.
 */
#define MOST_HEARTBEATS 3
#define MOST_RECEIVED 5
#define LIMIT 2 /* looks without a heartbeat until a host is given up */

/* ---- the host that speaks */

bool is_stopped, lost_reason; /* marks in its run directory */
bool sigterm[2], has_ended[2]; /* of its ranks */
bool asked; /* by its operator, to stop */
bool failed; /* a rank, or all of the host */

/* ---- datagrams that the network has seen */

byte heartbeats; /* this many; each says when it was sent, by its number */
bool leaves, lost;

/* ---- the host that listens */

byte newest; /* heartbeat */
byte received; /* datagrams */
byte heard; /* heartbeats that counted */
bool is_gone; /* the other leaves: it is not missed */
bool is_lost; /* the other is lost: this host ends */
bool was_told; /* that the other is lost */
byte silence;
bool is_over; /* this host ends */

inline say_stopped() { /* the launcher marks before it speaks, and before it signals */
	asked = true;
	is_stopped = true;
	leaves = true
}

inline say_lost() {
	lost_reason = true;
	lost = true
}

inline close(has_error) { /* a rank ends; only the first one speaks */
	if
	:: me != 0 -> skip
	:: me == 0 && lost_reason -> lost = true
	:: me == 0 && !lost_reason && has_error && !is_stopped -> failed = true; lost = true
#ifdef MISTAKE_A_RANK_SPEAKS_FOR_ITS_LAUNCHER
	:: me == 0 && !lost_reason && (!has_error || is_stopped) -> leaves = true
#else
	:: me == 0 && !lost_reason && !has_error && !is_stopped -> skip /* its launcher knows why */
	:: me == 0 && !lost_reason && is_stopped -> leaves = true
#endif
	fi;
	has_ended[me] = true
}

active [2] proctype rank() {
	byte me = _pid;
	do
	:: atomic { heartbeats < MOST_HEARTBEATS -> heartbeats++ }
	:: atomic { !failed && !asked -> failed = true; has_ended[me] = true } -> break /* is killed */
	:: atomic { !failed && !asked -> failed = true }; close(true); break /* raises */
	:: sigterm[me] -> close(false); break
	:: has_ended[1 - me] && !asked -> close(false); break /* its engine ends it, by SIGTERM too */
	od
}

active proctype launcher() {
	if
	:: say_stopped()
	:: has_ended[0] || has_ended[1] ->
		if
		:: !asked -> say_lost()
		:: else
		fi
	:: atomic { !failed && !asked -> failed = true; has_ended[0] = true; has_ended[1] = true } /* power */
	fi;
	sigterm[0] = true;
	sigterm[1] = true
}

inline receive_heartbeat() {
	select (number : 1 .. heartbeats);
	if
#ifdef MISTAKE_OLD_HEARTBEATS_COUNT
	:: true ->
#else
	:: number > newest ->
#endif
		newest = number;
		heard++;
		assert(heard <= heartbeats); /* fresh */
		silence = 0;
#ifdef MISTAKE_THE_LAST_WORD_COUNTS
		is_lost = false;
#endif
#ifdef MISTAKE_LEAVING_IS_FORGOTTEN
		is_gone = false;
#endif
	:: else
	fi
}

inline receive() {
	received++;
	if
	:: heartbeats -> receive_heartbeat()
	:: leaves -> is_gone = true
#ifdef MISTAKE_THE_LAST_WORD_COUNTS
		; is_lost = false
#endif
	:: lost -> is_lost = true; was_told = true
#ifdef MISTAKE_STRANGERS_ARE_BELIEVED
	:: is_gone = true
	:: is_lost = true
	:: silence = 0; heard++
#endif
	fi;
	assert(!is_gone || asked); /* left */
	assert(!is_lost || failed); /* lost */
	assert(heard <= heartbeats) /* fresh */
}

inline look() {
	assert(!was_told || is_lost); /* told */
	if
	:: is_lost -> is_over = true
	:: !is_lost && is_gone -> skip
#ifndef MISTAKE_SILENCE_IS_NOT_COUNTED
	:: !is_lost && !is_gone ->
		silence++;
		if
		:: silence > LIMIT -> assert(!leaves_taken); is_over = true /* missed */
		:: else
		fi
#endif
	fi
}

active proctype listener() {
	byte number;
	bool leaves_taken; /* once true, the other host is not missed */
	do
	:: d_step { is_over -> skip } -> break
	:: atomic { !is_over && received < MOST_RECEIVED && (heartbeats || leaves || lost) -> receive();
		leaves_taken = leaves_taken || is_gone }
	:: atomic { !is_over && !(is_gone && !is_lost && received == MOST_RECEIVED) -> look() }
	:: is_gone && !is_lost && received == MOST_RECEIVED -> break
	od
}
