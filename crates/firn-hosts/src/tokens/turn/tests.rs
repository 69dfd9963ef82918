//! Tests of [`TokenMachine`], without threads and with a simulated clock.

use std::collections::VecDeque;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

const LIMITS: TokenLimits = TokenLimits {
    hold: Duration::from_millis(1000),
    wait: Duration::from_millis(5000),
};
const RENEW: Duration = Duration::from_secs(1);

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Returns the position of a host that waits for this holding of another host.
fn behind(holding: &str) -> QueuePosition {
    QueuePosition {
        holder: Some("other".into()),
        holding: holding.into(),
        ask_again_after: ms(10),
    }
}

/// Returns the use of the token that was permitted.
fn go(permit: Permit) -> TokenUse {
    match permit {
        Permit::Go(used) => used,
        Permit::Wait(time) => panic!("it has to wait for {time:?}"),
    }
}

#[track_caller]
fn must_wait(permit: Permit, at_most: Duration) {
    assert_eq!(permit, Permit::Wait(at_most));
}

/// Returns a machine that was granted its token at `start`.
fn holder(start: Instant) -> TokenMachine {
    let mut turn = TokenMachine::new(LIMITS, None, start);
    must_wait(turn.enter(start), LIMITS.wait);
    assert_eq!(turn.next_step(start), Step::Ask);
    turn.record_granted(start);
    assert!(turn.take_lane_wake());
    turn
}

#[test]
fn a_batch_ends_when_others_wait_and_after_the_last_write() {
    let start = Instant::now();
    let mut turn = holder(start);
    let (first, second) = (go(turn.enter(start)), go(turn.enter(start)));
    assert!(first.has_token());
    assert_eq!(turn.next_step(start), Step::Sleep(Some(ms(875))));
    assert_eq!(turn.next_step(start + ms(875)), Step::LookForOthers);
    turn.record_others(true, start + ms(876));
    let third = go(turn.enter(start + ms(999)));
    must_wait(turn.enter(start + ms(1000)), LIMITS.wait);
    for used in [&first, &second] {
        assert!(!turn.leave(used, start + ms(1100)));
    }
    assert!(matches!(turn.next_step(start + ms(1100)), Step::Sleep(_)));
    assert!(turn.leave(&third, start + ms(1200)));
    assert_eq!(turn.next_step(start + ms(1200)), Step::GiveBack);
    // A write that begins meanwhile waits until the token was given back, and gets it then.
    must_wait(turn.enter(start + ms(1200)), LIMITS.wait);
    assert_eq!(turn.next_step(start + ms(1200)), Step::GiveBack);
    turn.record_given_back();
    assert!(turn.take_lane_wake());
    assert_eq!(turn.next_step(start + ms(1200)), Step::Ask);
}

#[test]
fn a_batch_without_waiting_hosts_goes_on_without_a_gap() {
    let start = Instant::now();
    let mut turn = holder(start);
    let mut now = start;
    for _ in 0..10 {
        let used = go(turn.enter(now));
        now += ms(875);
        assert_eq!(turn.next_step(now), Step::LookForOthers);
        turn.record_others(false, now);
        assert!(turn.leave(&used, now));
    }
    assert_eq!(turn.figures(now).granted, 1);
}

#[test]
fn a_token_that_is_not_used_is_given_back() {
    let start = Instant::now();
    let mut turn = holder(start);
    let used = go(turn.enter(start));
    assert!(turn.leave(&used, start + ms(100)));
    assert_eq!(
        turn.next_step(start + ms(100)),
        Step::Sleep(Some(KEEP_UNUSED_FOR))
    );
    let used = go(turn.enter(start + ms(105)));
    assert!(turn.leave(&used, start + ms(200)));
    assert_eq!(
        turn.next_step(start + ms(200) + KEEP_UNUSED_FOR),
        Step::GiveBack
    );
}

#[test]
fn a_lane_goes_on_without_a_service_that_is_silent_and_asks_ever_more_rarely() {
    let start = Instant::now();
    let mut turn = TokenMachine::new(LIMITS, None, start);
    must_wait(turn.enter(start), LIMITS.wait);
    assert_eq!(turn.next_step(start), Step::Ask);
    must_wait(turn.enter(start + ms(4999)), ms(1));
    assert!(!go(turn.enter(start + LIMITS.wait)).has_token());
    assert_eq!(turn.figures(start + LIMITS.wait).state, TokenState::Without);
    // The open request fails in the end, and is withdrawn.
    turn.record_failure("gone".into(), start + ms(6000));
    assert_eq!(turn.next_step(start + ms(6000)), Step::GiveBack);
    turn.record_given_back();
    let mut now = start + ms(6000);
    let mut pauses = Vec::new();
    for _ in 0..6 {
        assert!(!go(turn.enter(now)).has_token());
        let pause = match turn.next_step(now) {
            Step::Sleep(Some(pause)) => pause,
            step => panic!("{step:?}"),
        };
        pauses.push(pause.as_millis());
        now += pause;
        assert_eq!(turn.next_step(now), Step::Ask);
        assert!(!go(turn.enter(now)).has_token(), "no write waits for a try");
        turn.record_failure("gone".into(), now);
        assert_eq!(turn.next_step(now), Step::GiveBack);
        turn.record_given_back();
    }
    assert_eq!(pauses[1..], [10_000, 20_000, 40_000, 60_000, 60_000]);
    now += ms(60_000);
    assert_eq!(turn.next_step(now), Step::Ask);
    turn.record_granted(now);
    assert!(go(turn.enter(now)).has_token());
    assert_eq!(turn.figures(now).errors, 7);
}

#[test]
fn a_lane_without_work_asks_for_nothing() {
    let start = Instant::now();
    let mut turn = TokenMachine::new(LIMITS, None, start);
    must_wait(turn.enter(start), LIMITS.wait);
    assert!(!go(turn.enter(start + LIMITS.wait)).has_token());
    assert_eq!(turn.next_step(start + ms(100_000)), Step::Sleep(None));
}

#[test]
fn a_queue_that_moves_is_waited_for_and_a_holder_that_is_stuck_is_not() {
    let start = Instant::now();
    let mut turn = TokenMachine::new(LIMITS, None, start);
    must_wait(turn.enter(start), LIMITS.wait);
    let mut now = start;
    for round in 0..20 {
        assert_eq!(turn.next_step(now), Step::Ask);
        turn.record_queued(behind(&format!("{round}")), now);
        now += ms(1500);
        must_wait(turn.enter(now), ms(3500));
    }
    now += ms(2500);
    assert_eq!(turn.next_step(now), Step::Ask);
    turn.record_queued(behind("19"), now);
    assert!(!go(turn.enter(now + ms(1000))).has_token());
    // The queue still does not move, so no write waits for it again.
    now += ms(1000);
    assert_eq!(turn.next_step(now), Step::GiveBack);
    turn.record_given_back();
    assert!(!go(turn.enter(now)).has_token());
    now += ms(5000);
    assert_eq!(turn.next_step(now), Step::Ask);
    turn.record_queued(behind("19"), now);
    assert!(!go(turn.enter(now)).has_token());
    assert_eq!(turn.next_step(now), Step::GiveBack);
    turn.record_given_back();
    // Now the queue moves.
    now += ms(10_000);
    assert_eq!(turn.next_step(now), Step::Ask);
    turn.record_queued(behind("20"), now);
    must_wait(turn.enter(now), LIMITS.wait);
}

#[test]
fn a_token_whose_writes_hang_is_given_back_all_the_same() {
    let start = Instant::now();
    let mut turn = holder(start);
    let hung = go(turn.enter(start));
    turn.record_others(true, start + ms(900));
    assert!(matches!(turn.next_step(start + ms(5999)), Step::Sleep(_)));
    assert_eq!(turn.next_step(start + ms(6000)), Step::GiveBack);
    turn.record_given_back();
    must_wait(turn.enter(start + ms(6000)), LIMITS.wait);
    turn.next_step(start + ms(6000));
    turn.record_granted(start + ms(7000));
    let used = go(turn.enter(start + ms(7000)));
    assert!(
        !turn.leave(&hung, start + ms(7001)),
        "it is of another holding"
    );
    assert!(turn.leave(&used, start + ms(7002)));
}

#[test]
fn a_token_that_is_lost_is_asked_for_again() {
    let start = Instant::now();
    let mut turn = TokenMachine::new(LIMITS, Some(RENEW), start);
    must_wait(turn.enter(start), LIMITS.wait);
    turn.next_step(start);
    turn.record_granted(start);
    let used = go(turn.enter(start));
    turn.record_others(false, start + ms(500));
    assert_eq!(turn.next_step(start + ms(1000)), Step::Renew);
    turn.record_renewed(start + ms(1000));
    assert!(matches!(turn.next_step(start + ms(1001)), Step::Sleep(_)));
    turn.record_lost("its lease has ended".into(), start + ms(2000));
    assert_eq!(turn.next_step(start + ms(2000)), Step::GiveBack);
    turn.record_given_back();
    assert!(!turn.leave(&used, start + ms(2000)));
    must_wait(turn.enter(start + ms(2000)), LIMITS.wait);
}

/// If the service reports that the queue moves, a lane waits only for a bounded time. A lane whose queue is long keeps
/// its place in it. Proves S-token-5.
#[test]
fn a_queue_that_moves_for_ever_is_waited_for_once_and_for_a_bounded_time() {
    let start = Instant::now();
    let mut turn = TokenMachine::new(LIMITS, None, start);
    must_wait(turn.enter(start), LIMITS.wait);
    let mut now = start;
    let mut holder = 0;
    let mut name_another_holder = |turn: &mut TokenMachine, now| {
        holder += 1;
        turn.record_queued(behind(&format!("{holder}")), now);
    };
    while let Permit::Wait(_) = turn.enter(now) {
        assert!(
            now < start + LIMITS.wait * WAIT_FACTOR_MAX,
            "a wait has an end"
        );
        assert_eq!(turn.next_step(now), Step::Ask);
        name_another_holder(&mut turn, now);
        now += ms(1000);
    }
    assert_eq!(now, start + LIMITS.wait * WAIT_FACTOR_MAX);
    // The lane writes without the token, and repeats its request from its place in the queue.
    for _ in 0..100 {
        assert!(!go(turn.enter(now)).has_token());
        assert_eq!(turn.next_step(now), Step::Ask);
        name_another_holder(&mut turn, now);
        assert_eq!(turn.next_step(now), Step::Sleep(Some(RETRY.first())));
        now += ms(1000);
    }
    // Without work the lane leaves the queue. With work it joins the queue again, but does not wait.
    now += LIMITS.wait;
    assert_eq!(turn.next_step(now), Step::GiveBack);
    turn.record_given_back();
    assert!(!go(turn.enter(now)).has_token());
    assert_eq!(turn.next_step(now), Step::Ask);
    name_another_holder(&mut turn, now);
    assert!(!go(turn.enter(now)).has_token());
    // In the end the token is granted.
    now += RETRY.first();
    assert_eq!(turn.next_step(now), Step::Ask);
    turn.record_granted(now);
    assert!(go(turn.enter(now)).has_token());
    assert_eq!(turn.figures(now).went_without, 1);
}

/// A service that gives random answers at random times.
#[test]
fn no_answer_of_a_service_stops_a_lane_for_ever() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..200 {
        let mut now = Instant::now();
        let mut turn = TokenMachine::new(LIMITS, Some(RENEW), now);
        let mut waits_since = None;
        let says = rng.random_range(0..4);
        for holder in 0..2000 {
            match turn.enter(now) {
                Permit::Wait(_) => {
                    let since = *waits_since.get_or_insert(now);
                    assert!(now < since + LIMITS.wait * WAIT_FACTOR_MAX, "it waits on");
                }
                Permit::Go(used) => {
                    waits_since = None;
                    turn.leave(&used, now);
                }
            }
            let answer = match rng.random_range(0..10) {
                0 => rng.random_range(0..4),
                _ => says,
            };
            match turn.next_step(now) {
                Step::Ask if answer == 0 => turn.record_failure("it fails".into(), now),
                Step::Ask if answer == 1 => turn.record_queued(behind("stuck"), now),
                Step::Ask if answer == 2 => turn.record_queued(behind(&holder.to_string()), now),
                Step::Ask => turn.record_granted(now),
                Step::GiveBack => turn.record_given_back(),
                Step::LookForOthers => turn.record_others(answer != 0, now),
                Step::Renew if answer == 0 => turn.record_lost("lost".into(), now),
                Step::Renew => turn.record_renewed(now),
                Step::Sleep(_) => {}
            }
            now += ms(rng.random_range(0..800));
        }
    }
}

/// Hosts under random calls, with a service that has a queue and may be silent.
struct World {
    now: Instant,
    hosts: Vec<Host>,
    queue: VecDeque<usize>,
    is_silent: bool,
    holdings: u64,
}

struct Host {
    turn: TokenMachine,
    uses: Vec<TokenUse>,
    /// Since when this host waits while the service is silent. `None` if it does not wait.
    blocked_since: Option<Instant>,
}

impl World {
    fn enter(&mut self, at: usize) {
        let now = self.now;
        let is_silent = self.is_silent;
        let host = &mut self.hosts[at];
        match host.turn.enter(now) {
            Permit::Wait(time) => {
                assert!(time <= LIMITS.wait);
                if is_silent && host.uses.is_empty() {
                    let since = *host.blocked_since.get_or_insert(now);
                    assert!(now < since + LIMITS.wait, "it waits for a silent service");
                }
            }
            Permit::Go(used) => {
                host.blocked_since = None;
                host.uses.push(used);
            }
        }
    }

    fn leave(&mut self, at: usize) {
        if let Some(used) = self.hosts[at].uses.pop() {
            self.hosts[at].turn.leave(&used, self.now);
        }
    }

    fn keep(&mut self, at: usize) {
        let now = self.now;
        let turn = &mut self.hosts[at].turn;
        match turn.next_step(now) {
            Step::Sleep(_) => {}
            Step::GiveBack => {
                // Even a silent service drops the host after the host's lease has ended.
                if self.queue.front() == Some(&at) {
                    self.holdings += 1;
                }
                self.queue.retain(|member| *member != at);
                turn.record_given_back();
            }
            _ if self.is_silent => turn.record_failure("silent".into(), now),
            Step::Ask => {
                if !self.queue.contains(&at) {
                    self.queue.push_back(at);
                }
                if self.queue.front() == Some(&at) {
                    turn.record_granted(now);
                } else {
                    turn.record_queued(behind(&self.holdings.to_string()), now);
                }
            }
            Step::LookForOthers => turn.record_others(self.queue.len() > 1, now),
            Step::Renew => turn.record_renewed(now),
        }
    }

    fn check(&self) {
        let holders = self.hosts.iter().enumerate().filter(|(_, host)| {
            let is_held = matches!(host.turn.phase, Phase::Held(_));
            is_held && host.turn.uses > 0
        });
        for (at, _) in holders {
            assert_eq!(
                self.queue.front(),
                Some(&at),
                "only the first of the queue has it"
            );
        }
        for host in &self.hosts {
            let held = host
                .uses
                .iter()
                .filter(|used| used.grant_number == Some(host.turn.grant_number));
            assert_eq!(held.count() as u32, host.turn.uses);
        }
    }
}

#[test]
fn random_hosts_have_it_one_at_a_time_and_none_is_blocked() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..50 {
        let now = Instant::now();
        let host = |_| Host {
            turn: TokenMachine::new(LIMITS, Some(RENEW), now),
            uses: Vec::new(),
            blocked_since: None,
        };
        let mut world = World {
            now,
            hosts: (0..rng.random_range(1..6)).map(host).collect(),
            queue: VecDeque::new(),
            is_silent: false,
            holdings: 0,
        };
        for _ in 0..2000 {
            let at = rng.random_range(0..world.hosts.len());
            match rng.random_range(0..100) {
                0..35 => world.enter(at),
                35..65 => world.leave(at),
                65..90 => world.keep(at),
                90..99 => world.now += ms(rng.random_range(0..1500)),
                _ => {
                    world.is_silent = !world.is_silent;
                    world
                        .hosts
                        .iter_mut()
                        .for_each(|host| host.blocked_since = None);
                }
            }
            world.check();
        }
        // Once all writes have ended and the service answers, each host that wants the token gets it.
        world.is_silent = false;
        for at in 0..world.hosts.len() {
            while !world.hosts[at].uses.is_empty() {
                world.leave(at);
            }
        }
        for at in 0..world.hosts.len() {
            let mut has_token = false;
            for _ in 0..20_000 {
                world.enter(at);
                has_token |= world.hosts[at].uses.iter().any(TokenUse::has_token);
                world.leave(at);
                if has_token {
                    break;
                }
                (0..world.hosts.len()).for_each(|at| world.keep(at));
                world.now += ms(7);
            }
            assert!(has_token, "host {at} gets it in the end");
        }
    }
}
