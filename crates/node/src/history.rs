//! The history of a guest on this host: what became of its protection, kept on disk.
//!
//! One JSON object a line, in `STATE/GUEST/history.jsonl`, by a thread of its own: nobody waits for
//! the disk but a program that is about to end. A record is on disk (fsync) before the next one is
//! written. A line that a crash has torn stays as it is, and the next record begins a line of its
//! own. Where nothing can be written, that is said once, and the records wait in memory.

mod disk;
mod record;
mod show;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use hotspare_image::NodeId;

pub use self::record::{Loss, Record, What, ms, now_ms, utc, utc_ms};
pub use self::show::{print, show};
use crate::metrics::Meters;
use crate::report::{News, Reporter};

/// Where histories lie, unless `--state-dir` says otherwise.
pub const STATE_DIR: &str = "/var/lib/hotspare";

/// Records that wait for a disk that can be written again.
const WAITING_MAX: usize = 256;
/// How often a disk that cannot be written is tried.
const AGAIN: Duration = Duration::from_secs(10);
/// How long the end of the program is put off for the disk.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// Records of checkpoints that are late or refused: so many at once …
const MINOR_BURST: u32 = 60;
/// … and then one in this time, lest they push out what matters.
const MINOR_EVERY: Duration = Duration::from_secs(60);

enum Job {
    Write(Box<Record>),
    Flush(Sender<()>),
}

/// The way to the thread that writes. Cheap to clone.
#[derive(Clone)]
pub struct History {
    node: NodeId,
    host: String,
    jobs: Sender<Job>,
    meters: Arc<Meters>,
    reporter: Reporter,
    state: PathBuf,
}

impl History {
    /// A history below `state`, which need not exist yet.
    pub fn begin(
        state: &Path,
        node: NodeId,
        reporter: &Reporter,
        meters: Arc<Meters>,
    ) -> std::io::Result<Self> {
        let (jobs, inbox) = channel();
        let writer = Writer {
            state: state.to_owned(),
            reporter: reporter.clone(),
            waiting: VecDeque::new(),
            is_told: false,
            minor: Minor::new(Instant::now()),
            meters: meters.clone(),
        };
        std::thread::Builder::new().name("history".into()).spawn(move || writer.run(&inbox))?;
        let host = nix::unistd::gethostname().unwrap_or_default();
        let host = host.to_string_lossy().into_owned();
        let (reporter, state) = (reporter.clone(), state.to_owned());
        Ok(Self { node, host, jobs, meters, reporter, state })
    }

    /// Notes what has happened now to `guest`. Waits for nothing.
    pub fn note(&self, guest: &str, (term, epoch): (u64, u64), what: What) {
        self.meters.note(&what);
        let record = Record::now(&self.host, self.node, guest, (term, epoch), what);
        self.reporter.tell(|| News::Record(Box::new(record.clone())));
        // The writer lives as long as somebody can tell it something.
        let _ = self.jobs.send(Job::Write(Box::new(record)));
    }

    /// What is kept of `guest`, oldest first, and how many lines of it are torn. Of a spare without
    /// a guest: of all.
    pub fn read(&self, guest: Option<&str>) -> anyhow::Result<(Vec<Record>, usize)> {
        self.flush();
        let (records, torn) = show::read_all(&self.state, guest)?;
        Ok((records, torn.iter().map(|(_, lines)| lines).sum()))
    }

    /// Waits until everything noted is on disk, or that takes too long.
    pub fn flush(&self) {
        let (done, wait) = channel();
        if self.jobs.send(Job::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(LAST_WORDS);
        }
    }
}

/// The thread that writes.
struct Writer {
    state: PathBuf,
    reporter: Reporter,
    waiting: VecDeque<Record>,
    /// It has been said that nothing can be written.
    is_told: bool,
    minor: Minor,
    meters: Arc<Meters>,
}

impl Writer {
    fn run(mut self, inbox: &Receiver<Job>) {
        loop {
            let job = match self.waiting.is_empty() {
                true => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => inbox.recv_timeout(AGAIN),
            };
            match job {
                Ok(Job::Write(mut record)) => {
                    if !self.minor.admits(&mut record, Instant::now()) {
                        continue;
                    }
                    if self.waiting.len() == WAITING_MAX {
                        self.waiting.pop_front();
                    }
                    self.waiting.push_back(*record);
                    self.write_waiting();
                }
                Ok(Job::Flush(done)) => {
                    self.write_waiting();
                    let _ = done.send(());
                }
                Err(RecvTimeoutError::Timeout) => self.write_waiting(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn write_waiting(&mut self) {
        self.try_write();
        self.meters.unwritten.set(self.waiting.len() as u64);
    }

    fn try_write(&mut self) {
        while let Some(record) = self.waiting.front() {
            let path = disk::path(&self.state, &record.guest);
            if let Err(error) = disk::append(&path, &record.to_line()) {
                if !std::mem::replace(&mut self.is_told, true) {
                    self.reporter.warn(&format!(
                        "the history cannot be written ({}: {error}); the guest and its \
                         protection are not concerned. Make room or make it writable, or give \
                         another --state-dir; it is tried again every {} s. Not written: {}",
                        path.display(),
                        AGAIN.as_secs(),
                        record.to_line()
                    ));
                }
                return;
            }
            self.waiting.pop_front();
            if self.waiting.is_empty() && std::mem::take(&mut self.is_told) {
                self.reporter.note("the history is written again");
            }
        }
    }
}

/// Lets so many records through that come in great number when something flaps.
struct Minor {
    left: u32,
    since: Instant,
    left_out: u64,
}

impl Minor {
    fn new(now: Instant) -> Self {
        Self { left: MINOR_BURST, since: now, left_out: 0 }
    }

    fn admits(&mut self, record: &mut Record, now: Instant) -> bool {
        if !record.what.is_minor() {
            return true;
        }
        while self.left < MINOR_BURST && now.duration_since(self.since) >= MINOR_EVERY {
            self.since += MINOR_EVERY;
            self.left += 1;
        }
        if self.left == MINOR_BURST {
            self.since = now;
        }
        let Some(left) = self.left.checked_sub(1) else {
            self.left_out += 1;
            return false;
        };
        self.left = left;
        record.left_out = std::mem::take(&mut self.left_out);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(what: What) -> Record {
        Record::now("alpha", NodeId(7), "redis", (1, 2), what)
    }

    #[test]
    fn what_flaps_pushes_nothing_out() {
        let began = Instant::now();
        let mut minor = Minor::new(began);
        let mut late = record(What::Late { why: "x".into() });
        let admitted = (0..1000).filter(|_| minor.admits(&mut late, began)).count();
        assert_eq!(admitted, MINOR_BURST as usize);
        assert!(minor.admits(&mut record(What::Protected), began), "what matters always comes in");
        assert!(minor.admits(&mut late, began + MINOR_EVERY));
        assert_eq!(late.left_out, 1000 - u64::from(MINOR_BURST));
        assert!(!minor.admits(&mut late, began + MINOR_EVERY));
    }

    #[test]
    fn what_could_not_be_written_is_written_once_that_is_possible() {
        let state = tempfile::tempdir().unwrap();
        let blocked = state.path().join("redis");
        std::fs::write(&blocked, "a file where the directory should be").unwrap();
        let reporter = Reporter::new(true);
        let history = History::begin(state.path(), NodeId(7), &reporter, Arc::default()).unwrap();
        history.note("redis", (1, 2), What::Protected);
        history.flush();
        std::fs::remove_file(&blocked).unwrap();
        history.note("redis", (1, 3), What::Unprotected { why: "y".into() });
        history.flush();
        let (records, torn) = disk::read(&disk::path(state.path(), "redis")).unwrap();
        let epochs: Vec<u64> = records.iter().map(|record| record.epoch).collect();
        assert_eq!((epochs, torn), (vec![2, 3], 0));
    }
}
