//! Clients that load a server at a steady rate and verify every reply.
//!
//! The load is open-loop: each request is due at an instant fixed beforehand, whatever became of
//! those before it, and its latency counts from that instant. A server that stalls is charged for
//! every request that should have been answered meanwhile (no coordinated omission).
//!
//! A load has several *lanes*, each a connection with one request in flight. When it breaks, the
//! lane connects anew and first looks at what the server still knows.

mod connection;
mod crowd;
mod http;
mod iproto;
mod lane;
mod stored;
mod wire;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::Host;
use crate::clock::Instant;

use self::crowd::Crowd;

pub use self::connection::{ClientError, Connection};
pub use self::http::{HttpBody, HttpLane};
pub use self::lane::{Lane, LaneRecord, Outcome, Reply, Session};
pub use self::stored::{Loss, StoreLane, StorePlan, Verdict, verify};
pub use self::wire::Protocol;
pub(crate) use self::wire::resp;

/// How hard to load a server, and how patiently.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Requests a second, over all lanes.
    pub rate_per_s: f64,
    /// Connections.
    pub lanes: usize,
    /// A reply later than this counts as none: the lane connects anew.
    pub reply_at_most: Duration,
    /// A connection that takes longer is tried again.
    pub connect_at_most: Duration,
}

impl Pace {
    /// Between two requests of one of so many lanes.
    fn interval(&self, lanes: usize) -> Duration {
        Duration::from_secs_f64(lanes as f64 / self.rate_per_s)
    }
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            rate_per_s: 1000.0,
            lanes: 4,
            reply_at_most: Duration::from_millis(250),
            connect_at_most: Duration::from_millis(100),
        }
    }
}

/// What lanes and the owner of a load share.
#[derive(Debug, Default)]
pub struct Progress {
    stop: AtomicBool,
    /// Send time of the latest request that was answered.
    answered: AtomicU64,
}

impl Progress {
    fn answer(&self, sent: Instant) {
        self.answered.fetch_max(sent.0, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A running load.
pub struct Load<S> {
    lanes: Vec<JoinHandle<Vec<LaneRecord<S>>>>,
    progress: Arc<Progress>,
}

impl<S: Session + 'static> Load<S> {
    /// Starts one lane for each session, on threads inside `client`. Returns when every lane has
    /// opened its session (for a store: has written its keys), or has failed to in `at_most`.
    pub fn start(
        client: &Host,
        server: SocketAddr,
        pace: Pace,
        sessions: Vec<S>,
        at_most: Duration,
    ) -> Load<S> {
        let progress = Arc::new(Progress::default());
        let count = sessions.len();
        let barrier = Arc::new(Barrier::new(count + 1));
        let start_lane = |(number, session): (usize, S)| {
            let (progress, barrier) = (Arc::clone(&progress), Arc::clone(&barrier));
            let mut lane = Lane::new(server, pace, session, progress);
            client.thread(move || {
                lane.open_within(at_most);
                barrier.wait();
                let interval = pace.interval(count);
                let phase = interval.mul_f64(number as f64 / count as f64);
                lane.run(Instant::now() + phase, interval);
                vec![lane.close_within(at_most)]
            })
        };
        let lanes = sessions.into_iter().enumerate().map(start_lane).collect();
        barrier.wait();
        Load { lanes, progress }
    }

    /// As [`Load::start`], all lanes on one thread: less work for the processors, but while one
    /// lane connects anew the others wait.
    pub fn start_together(
        client: &Host,
        server: SocketAddr,
        pace: Pace,
        sessions: Vec<S>,
        at_most: Duration,
    ) -> Load<S> {
        let progress = Arc::new(Progress::default());
        let interval = pace.interval(sessions.len());
        let lane = |session| Lane::new(server, pace, session, Arc::clone(&progress));
        let lanes = sessions.into_iter().map(lane).collect();
        let barrier = Arc::new(Barrier::new(2));
        let (shared, opened) = (Arc::clone(&progress), Arc::clone(&barrier));
        let all = client.thread(move || {
            let mut crowd = Crowd::new(lanes, interval);
            crowd.open_within(at_most);
            opened.wait();
            crowd.run(Instant::now(), || shared.is_stopped());
            crowd.close_within(at_most)
        });
        barrier.wait();
        Load { lanes: vec![all], progress }
    }

    /// True if a request that was sent after `instant` has been answered.
    pub fn is_answered_after(&self, instant: Instant) -> bool {
        self.progress.answered.load(Ordering::Relaxed) > instant.0
    }

    /// Waits for an answer to a request sent after `instant`; false if none comes in time.
    pub fn answered_after(&self, instant: Instant, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        while !self.is_answered_after(instant) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Ends the load; each lane looks at everything it has stored a last time.
    pub fn finish(mut self) -> Vec<LaneRecord<S>> {
        self.progress.stop.store(true, Ordering::Relaxed);
        let join = |lanes: JoinHandle<Vec<LaneRecord<S>>>| {
            lanes.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        self.lanes.drain(..).flat_map(join).collect()
    }
}

impl<S> Drop for Load<S> {
    fn drop(&mut self) {
        self.progress.stop.store(true, Ordering::Relaxed);
    }
}
