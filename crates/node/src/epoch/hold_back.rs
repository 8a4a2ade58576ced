//! A guest that writes faster than it can be copied is held back until the copy has caught up.
//!
//! It stands still for moments while its memory is copied and sent, and runs between them. So its
//! clients wait for milliseconds at a time, not for as long as it takes to copy all that it has
//! written, and no more of that is in our memory than a spare's queue holds. (QEMU's migration does
//! the same by slowing virtual processors down: `auto-converge`.) A spare that takes nothing for a
//! whole moment is not waited for: the guest runs then.

use std::time::{Duration, Instant};

use hotspare_kernel::realtime::Urgent;
use hotspare_process::guest::Guest;
use hotspare_process::objects::error::ObjectResult;
use hotspare_process::pages::PageRun;

use super::{EpochMaker, Obstacle, Open, PAUSE_PRIORITY, files_failed};
use crate::outgoing::PIECE_BYTES;

/// Longest time that the guest stands still at once.
const MOMENT: Duration = Duration::from_millis(15);
/// How long it runs between two; half of that after each moment that has not helped.
const RUN_MAX: Duration = Duration::from_millis(4);
const RUN_MIN: Duration = Duration::from_micros(500);
/// What has not helped by then does not help.
const LIMIT: Duration = Duration::from_secs(5);
/// Between two looks whether a spare has taken something.
const LOOK: Duration = Duration::from_micros(200);

/// How a guest has been held back for a checkpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldBack {
    since: Option<Instant>,
    /// So long it stood still.
    pub stood: Duration,
    /// Pages that the last moment left.
    left: u64,
    run: Duration,
}

impl Default for HeldBack {
    fn default() -> Self {
        Self { since: None, stood: Duration::ZERO, left: u64::MAX, run: RUN_MAX }
    }
}

/// How a moment has ended.
enum Moment {
    /// Everything is copied.
    CaughtUp,
    /// There is more to copy.
    Over,
    /// Things come faster than somebody takes them.
    NoRoom(Obstacle),
}

impl HeldBack {
    /// Whether holding the guest back has not helped.
    pub fn in_vain(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() > LIMIT)
    }

    /// How long the guest runs after a moment that has left so many pages.
    fn run_after(&mut self, left: u64) -> Duration {
        if left >= self.left {
            self.run = (self.run / 2).max(RUN_MIN);
        }
        self.left = left;
        self.run
    }
}

impl EpochMaker {
    /// Holds the guest still for a moment to copy and send; `None` once nothing is left.
    pub(super) fn hold_back(&mut self) -> ObjectResult<Option<Obstacle>> {
        let Self { guest, open, takers, .. } = self;
        let Some(open) = open else { return Ok(None) };
        let began = Instant::now();
        open.held_back.since.get_or_insert(began);
        let send = |open: &mut Open| {
            let mut sent = Sent::default();
            loop {
                sent.without_room = takers.without_room();
                if sent.without_room.is_some() {
                    return Ok(sent);
                }
                let Some(piece) = open.outgoing.next().map_err(files_failed)? else {
                    return Ok(sent);
                };
                takers.send(&piece);
                sent.something = true;
            }
        };
        let urgent = Urgent::begin(PAUSE_PRIORITY);
        let moment = guest.freeze(|guest| copy_for_a_moment(guest, open, send));
        drop(urgent);
        open.held_back.stood += began.elapsed();
        match moment?? {
            Moment::CaughtUp => Ok(None),
            Moment::NoRoom(obstacle) => Ok(Some(obstacle)),
            Moment::Over => {
                let run = open.held_back.run_after(guest.backlog_pages());
                guest.pump(&[], run)?;
                Ok(Some(Obstacle::Work))
            }
        }
    }
}

/// What became of what waited.
#[derive(Default)]
struct Sent {
    /// A piece was sent.
    something: bool,
    /// Who keeps the rest waiting; if nobody, nothing waits any more.
    without_room: Option<Obstacle>,
}

fn copy_for_a_moment(
    guest: &mut Guest,
    open: &mut Open,
    send: impl Fn(&mut Open) -> ObjectResult<Sent>,
) -> ObjectResult<Moment> {
    guest.scan_stopped()?;
    // However long that has taken, something is copied.
    let end = Instant::now() + MOMENT;
    let mut sent_something = false;
    loop {
        let sent = send(open)?;
        sent_something |= sent.something;
        if sent.without_room.is_none() && guest.backlog_pages() == 0 {
            return Ok(Moment::CaughtUp);
        }
        let is_over = Instant::now() > end;
        match sent.without_room {
            Some(obstacle) if is_over && !sent_something => return Ok(Moment::NoRoom(obstacle)),
            _ if is_over => return Ok(Moment::Over),
            Some(_) => {
                std::thread::sleep(LOOK);
                continue;
            }
            None => {}
        }
        let mut runs = Vec::new();
        guest.precopy(PIECE_BYTES, &mut runs)?;
        open.pages += runs.iter().map(PageRun::pages).sum::<u64>();
        open.outgoing.add_runs(runs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_less_it_helps_the_less_the_guest_runs() {
        let mut held = HeldBack::default();
        let runs =
            [9000, 8000, 8000, 9000, 5000, 5000, 6000, 6000].map(|left| held.run_after(left));
        let us = runs.map(|run| run.as_micros());
        assert_eq!(us, [4000, 4000, 2000, 1000, 1000, 500, 500, 500]);
    }

    #[test]
    fn it_is_held_back_for_some_time_only() {
        let since = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds));
        let held = |seconds| HeldBack { since: since(seconds), ..HeldBack::default() };
        assert!(!held(1).in_vain() && held(6).in_vain() && !HeldBack::default().in_vain());
    }
}
