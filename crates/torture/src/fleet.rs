//! Many connections on one thread, each of which knows what every reply has to be.
//!
//! Unlike [`crate::clients`], where a lane is a thread and its pace is fixed, hundreds of
//! connections cost little here, requests may follow each other without waiting (pipelining), and
//! the load changes while it runs. For campaigns, which last for hours: nothing is kept but counts.

mod line;
mod store;
mod web;

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use self::line::{Line, News};
use crate::Host;
use crate::clock::Instant;
use crate::dice::Dice;
use crate::lab::lock;

pub use self::store::StoreTalk;
pub use self::web::WebTalk;

/// Broken promises that are told in words.
const WORDS_MAX: usize = 12;
/// The loop turns at least this often.
const TURN_MS: u16 = 5;
/// One request after the other on the line that probes, so often.
const PROBE_EVERY: Duration = Duration::from_millis(4);

/// A reply that breaks a promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// So many acknowledged writes are gone.
    Lost(u64, String),
    /// So many were done twice.
    Duplicate(u64, String),
    /// Anything else.
    Error(String),
}

/// What one connection says, and what it must hear.
pub trait Talk: Send {
    /// Appends the next request.
    fn ask(&mut self, request: &mut Vec<u8>);

    /// Takes the reply to the oldest request that has none: its length, or nothing if it is not
    /// whole yet.
    fn hear(&mut self, bytes: &[u8]) -> Option<(usize, Result<(), Wrong>)>;

    /// The connection is a new one. Requests without a reply may have been done or not.
    fn begins_anew(&mut self);
}

/// How hard clients ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Requests a second, over all connections, at random instants.
    PerSecond(u32),
    /// Each connection asks again as soon as it has its reply.
    Saturated,
}

impl std::fmt::Display for Pace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Pace::PerSecond(0) => f.write_str("idle"),
            Pace::PerSecond(rate) => write!(f, "{rate}/s"),
            Pace::Saturated => f.write_str("saturated"),
        }
    }
}

/// What was seen since it was last asked.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Good replies.
    pub replies: u64,
    /// Connections that were reset, closed or refused.
    pub resets: u64,
    /// Wrong replies, and none in time.
    pub errors: u64,
    /// Acknowledged writes that are gone.
    pub lost: u64,
    /// Writes that were done twice.
    pub duplicates: u64,
    /// The first of these in words.
    pub words: Vec<String>,
    /// The first of those who waited for long, in words.
    pub slow: Vec<String>,
    /// The longest time in which somebody waited and nobody had a reply.
    pub silence: Duration,
    /// The longest time from a request to its reply.
    pub wait: Duration,
}

/// Replies of a hundredth of a second.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    /// When the first of them came.
    pub at: Instant,
    /// How many.
    pub replies: u64,
    /// The longest time from a request to its reply.
    pub wait: Duration,
}

/// Between two marks.
const MARK_EVERY: Duration = Duration::from_millis(10);
/// Marks that are kept: a quarter of an hour with replies all the time.
const MARKS_MAX: usize = 90_000;

impl Seen {
    /// Adds what was seen later.
    pub fn add(&mut self, later: &Seen) {
        self.replies += later.replies;
        self.resets += later.resets;
        self.errors += later.errors;
        self.lost += later.lost;
        self.duplicates += later.duplicates;
        self.silence = self.silence.max(later.silence);
        self.wait = self.wait.max(later.wait);
        later.words.iter().for_each(|words| self.say(words.clone()));
        let room = WORDS_MAX.saturating_sub(self.slow.len());
        self.slow.extend(later.slow.iter().take(room).cloned());
    }

    /// True if no client has noticed anything but time.
    pub fn is_good(&self) -> bool {
        self.resets + self.errors + self.lost + self.duplicates == 0
    }

    /// Counts a broken promise.
    pub fn count(&mut self, wrong: Wrong) {
        let words = match wrong {
            Wrong::Lost(count, words) => {
                self.lost += count;
                words
            }
            Wrong::Duplicate(count, words) => {
                self.duplicates += count;
                words
            }
            Wrong::Error(words) => {
                self.errors += 1;
                words
            }
        };
        self.say(words);
    }

    /// Counts a connection that broke.
    pub fn reset(&mut self, words: String) {
        self.resets += 1;
        self.say(words);
    }

    fn say(&mut self, words: String) {
        if self.words.len() < WORDS_MAX {
            self.words.push(words);
        }
    }
}

/// What the thread and its owner share.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// Requests a second; `u64::MAX` is saturated.
    rate: AtomicU64,
    probes: AtomicBool,
    /// Every line is to ask after this instant.
    roll: AtomicU64,
    seen: Mutex<(Seen, Roll)>,
    marks: Mutex<Vec<Mark>>,
}

/// Who has been answered.
#[derive(Clone, Copy, Debug, Default)]
struct Roll {
    of: Instant,
    behind: usize,
}

/// What a fleet is made of.
pub struct Crew {
    /// Where the server is.
    pub server: SocketAddr,
    /// One for each connection that is held.
    pub held: Vec<Box<dyn Talk>>,
    /// One for each that connects anew again and again.
    pub callers: Vec<Box<dyn Talk>>,
    /// No reply in this time is an error, and the connection is given up.
    pub patience: Duration,
    /// Decides when each asks.
    pub seed: u64,
}

/// Connections that are held, whatever happens.
pub struct Fleet {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Fleet {
    /// Connects all, on a thread inside `client`. Nobody asks anything yet.
    pub fn start(client: &Host, crew: Crew) -> Fleet {
        let shared = Arc::new(Shared::default());
        let of = Arc::clone(&shared);
        let thread = Some(client.thread(move || Sea::new(crew, of).run()));
        Fleet { shared, thread }
    }

    /// From now on clients ask like this.
    pub fn set_pace(&self, pace: Pace) {
        let rate = match pace {
            Pace::PerSecond(rate) => u64::from(rate),
            Pace::Saturated => u64::MAX,
        };
        self.shared.rate.store(rate, Ordering::Relaxed);
    }

    /// One connection asks all the time, so that silence shows however idle the others are.
    pub fn probe(&self, probes: bool) {
        self.shared.probes.store(probes, Ordering::Relaxed);
    }

    /// Has every connection ask something and waits for all replies; if they do not come in time,
    /// the number of connections without one.
    pub fn roll_call(&self, at_most: Duration) -> Result<(), usize> {
        let now = Instant::now();
        self.shared.roll.store(now.0, Ordering::Relaxed);
        let deadline = now + at_most;
        loop {
            let roll = lock(&self.shared.seen).1;
            let is_of_now = roll.of == now;
            if is_of_now && roll.behind == 0 {
                return Ok(());
            }
            if Instant::now() > deadline || self.is_over() {
                return Err(roll.behind);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// What was seen since this was last asked.
    pub fn take_seen(&self) -> Seen {
        std::mem::take(&mut lock(&self.shared.seen).0)
    }

    /// Replies over time, since the begin.
    pub fn track(&self) -> Vec<Mark> {
        lock(&self.shared.marks).clone()
    }

    fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Whoever asked it has heard that it is over.
            let _ = thread.join();
        }
    }
}

/// The thread's own.
struct Sea {
    lines: Vec<Line>,
    shared: Arc<Shared>,
    dice: Dice,
    rate: u64,
    /// When the last reply came.
    last: Instant,
}

impl Sea {
    fn new(crew: Crew, shared: Arc<Shared>) -> Sea {
        let dice = Dice::new(crew.seed);
        let held = crew.held.into_iter().map(|talk| (talk, false));
        let callers = crew.callers.into_iter().map(|talk| (talk, true));
        let line = |(number, (talk, calls)): (usize, (Box<dyn Talk>, bool))| {
            let dice = dice.part(number as u64);
            Line::new(crew.server, talk, crew.patience, calls, dice)
        };
        let lines = held.chain(callers).enumerate().map(line).collect();
        Sea { lines, shared, dice, rate: 0, last: Instant::now() }
    }

    fn run(mut self) {
        let mut ready: Vec<PollFlags> = Vec::new();
        while !self.shared.stop.load(Ordering::Relaxed) {
            let mut news = News::default();
            self.ask();
            self.wait(&mut ready);
            let now = Instant::now();
            for (line, ready) in self.lines.iter_mut().zip(&ready) {
                line.turn(*ready, now, &mut news);
            }
            self.tell(news);
        }
    }

    /// Has lines ask whose time has come.
    fn ask(&mut self) {
        let now = Instant::now();
        let rate = self.shared.rate.load(Ordering::Relaxed);
        if rate != self.rate {
            self.rate = rate;
            for line in &mut self.lines {
                line.due = now + self.dice.between(Duration::ZERO, interval(rate, 200) * 2);
            }
        }
        let roll = Instant(self.shared.roll.load(Ordering::Relaxed));
        let count = self.lines.len();
        for line in &mut self.lines {
            if rate == u64::MAX {
                line.ask_if_free(now);
            } else if rate > 0 && line.due <= now {
                line.ask(now);
                let mean = interval(rate, count);
                line.due = now + self.dice.between(Duration::ZERO, mean * 2);
            }
            if line.last_asked < roll {
                line.ask(now);
            }
        }
        if self.shared.probes.load(Ordering::Relaxed)
            && let Some(first) = self.lines.first_mut()
            && first.last_asked + PROBE_EVERY <= now
        {
            first.ask_if_free(now);
        }
    }

    /// Waits until a line has something to read or room to write.
    fn wait(&self, ready: &mut Vec<PollFlags>) {
        let wanted = self.lines.iter().map(|line| Some((line.stream()?, line.wants())));
        let wanted: Vec<Option<(&TcpStream, PollFlags)>> = wanted.collect();
        let polled = wanted.iter().flatten().map(|(fd, flags)| PollFd::new(fd.as_fd(), *flags));
        let mut polled: Vec<PollFd<'_>> = polled.collect();
        let woken = poll(&mut polled, PollTimeout::from(TURN_MS));
        let mut flags = polled.iter().map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
        ready.clear();
        for wanted in &wanted {
            let found = if wanted.is_some() { flags.next() } else { None };
            let found = found.filter(|_| woken.is_ok());
            ready.push(found.unwrap_or(PollFlags::empty()));
        }
    }

    fn tell(&mut self, news: News) {
        let roll = Instant(self.shared.roll.load(Ordering::Relaxed));
        let behind = self.lines.iter().filter(|line| line.answered < roll).count();
        self.mark(&news);
        let mut shared = lock(&self.shared.seen);
        let seen = &mut shared.0;
        for reply in &news.replies {
            let waited_since = self.last.max(reply.sent);
            seen.silence = seen.silence.max(reply.done.since(waited_since));
            seen.wait = seen.wait.max(reply.done.since(reply.sent));
            self.last = self.last.max(reply.done);
        }
        seen.replies += news.replies.len() as u64;
        news.wrongs.into_iter().for_each(|wrong| seen.count(wrong));
        let room = WORDS_MAX.saturating_sub(seen.slow.len());
        seen.slow.extend(news.slow.into_iter().take(room));
        news.resets.into_iter().for_each(|words| seen.reset(words));
        shared.1 = Roll { of: roll, behind };
    }
}

impl Sea {
    fn mark(&self, news: &News) {
        let mut marks = lock(&self.shared.marks);
        let mut count = marks.len();
        for reply in &news.replies {
            let wait = reply.done.since(reply.sent);
            match marks.last_mut() {
                Some(mark) if reply.done.since(mark.at) < MARK_EVERY => {
                    mark.replies += 1;
                    mark.wait = mark.wait.max(wait);
                }
                _ if count < MARKS_MAX => {
                    count += 1;
                    marks.push(Mark { at: reply.done, replies: 1, wait });
                }
                _ => {}
            }
        }
    }
}

/// Between two requests of one of so many connections.
fn interval(rate: u64, connections: usize) -> Duration {
    Duration::from_secs_f64(connections as f64 / rate.clamp(1, 1 << 20) as f64)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    struct Echo;

    impl Talk for Echo {
        fn ask(&mut self, request: &mut Vec<u8>) {
            request.push(b'?');
        }

        fn hear(&mut self, bytes: &[u8]) -> Option<(usize, Result<(), Wrong>)> {
            (!bytes.is_empty()).then_some((1, Ok(())))
        }

        fn begins_anew(&mut self) {}
    }

    #[test]
    fn a_line_that_breaks_in_a_roll_call_asks_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        let served = std::thread::spawn(move || {
            let asked = || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0]).unwrap();
                stream
            };
            drop(asked());
            let mut second = asked();
            second.write_all(b"!").unwrap();
            second
        });
        let shared = Arc::new(Shared::default());
        let patience = Duration::from_secs(60);
        let (held, callers) = (vec![Box::new(Echo) as Box<dyn Talk>], Vec::new());
        let crew = Crew { server, held, callers, patience, seed: 1 };
        let sea = Sea::new(crew, Arc::clone(&shared));
        let thread = Some(std::thread::spawn(move || sea.run()));
        let fleet = Fleet { shared, thread };
        assert_eq!(fleet.roll_call(Duration::from_secs(60)), Ok(()), "nobody asks otherwise");
        assert_eq!(fleet.take_seen().resets, 1);
        drop(served.join().unwrap());
    }
}
