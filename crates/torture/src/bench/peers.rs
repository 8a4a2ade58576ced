//! What else keeps a Redis from being lost, run as its users run it: snapshots of its own, a log
//! on disk, a replica, CRIU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::PORT;
use crate::clients::{ClientError, Connection, resp};
use crate::clock::{Instant, millis};
use crate::lab::{Host, LAB_DIR, LabError, Process};
use crate::protected::HANG;

/// A command of a Redis that takes the images, over and over.
#[derive(Clone, Debug)]
pub(super) enum Imaging {
    /// `SAVE`: Redis stands still while it writes.
    Save,
    /// `BGSAVE`: a forked process writes; Redis stands still for the fork.
    BgSave,
    /// `criu dump --leave-running` with this program.
    Criu(PathBuf),
}

/// One image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Image {
    /// When it was whole.
    pub done: Instant,
    /// How long Redis stood still for it, as the peer itself tells it.
    pub pause_ms: f64,
}

/// Takes images until it is dropped or finished.
pub(super) struct Imager {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Vec<Image>, LabError>>>,
}

impl Imager {
    /// Begins an image every `interval`, or when the one before is whole, if that is later.
    pub fn start(imaging: Imaging, host: &Arc<Host>, redis: i32, interval: Duration) -> Imager {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, inside, place) = (Arc::clone(&stop), Arc::clone(host), host.clone());
        let work = move || {
            let mut images = Vec::new();
            let mut due = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                let pause_ms = match &imaging {
                    Imaging::Save => save(&place)?,
                    Imaging::BgSave => background_save(&place)?,
                    Imaging::Criu(program) => dump(program, &place, redis)?,
                };
                images.push(Image { done: Instant::now(), pause_ms });
                while due <= Instant::now() {
                    due = due + interval;
                }
                due.sleep_until();
            }
            Ok(images)
        };
        Imager { stop, thread: Some(inside.thread(work)) }
    }

    /// Ends it; what it has made.
    pub fn finish(mut self) -> Result<Vec<Image>, LabError> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("it is finished once");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Imager {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Waits until the image is written; the time of the command.
fn save(host: &Host) -> Result<f64, LabError> {
    let start = Instant::now();
    let said = ask(host, &["SAVE"])?;
    expect(&said, "OK", "SAVE")?;
    Ok(millis(Instant::now().since(start)))
}

/// Waits until the image is written; the time of the fork.
fn background_save(host: &Host) -> Result<f64, LabError> {
    expect(&ask(host, &["BGSAVE"])?, "Background saving started", "BGSAVE")?;
    let deadline = Instant::now() + HANG;
    while info(host, "persistence", "rdb_bgsave_in_progress")? > 0.0 {
        if Instant::now() > deadline {
            return Err(LabError::Deadline { what: "the end of BGSAVE".into(), waited: HANG });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(info(host, "stats", "latest_fork_usec")? / 1e3)
}

/// Dumps Redis with its connections and lets it go on; the time it was frozen.
fn dump(criu: &Path, host: &Host, redis: i32) -> Result<f64, LabError> {
    let inside = Path::new(LAB_DIR).join("criu");
    let dir = host.outside(&inside);
    let of_dir = |source| LabError::Io { doing: format!("empty {}", dir.display()), source };
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(of_dir(error)),
        _ => fs::create_dir_all(&dir).map_err(of_dir)?,
    }
    let mut command = Command::new(criu);
    command.args(["dump", "--leave-running", "--tcp-established", "--manage-cgroups=ignore"]);
    // Where there is no iptables. It drops what clients send while the program is frozen.
    command.args(["--network-lock", "nftables", "--skip-in-flight"]);
    command.args(["-v1", "-o", "log", "-D"]).arg(&inside);
    host.run(command.args(["-t", &redis.to_string()]), HANG).map_err(|error| {
        let log = fs::read_to_string(dir.join("log")).unwrap_or_default();
        LabError::Io { doing: format!("{error}; criu says"), source: std::io::Error::other(log) }
    })?;
    let stats = fs::read(dir.join("stats-dump")).map_err(of_dir)?;
    let frozen_us = frozen_us(&stats).ok_or_else(|| LabError::Io {
        doing: "read stats-dump of criu".into(),
        source: std::io::ErrorKind::InvalidData.into(),
    })?;
    Ok(frozen_us as f64 / 1e3)
}

/// `frozen_time` of `stats-dump`: 12 bytes of magic and length, then `stats_entry` in protobuf,
/// whose first member `dump` has it as its second (criu, images/stats.proto).
fn frozen_us(stats: &[u8]) -> Option<u64> {
    let mut entry = stats.get(12..)?;
    const DUMP: u64 = 1 << 3 | 2;
    if varint(&mut entry)? != DUMP {
        return None;
    }
    let length = usize::try_from(varint(&mut entry)?).ok()?;
    let mut dump = entry.get(..length)?;
    while !dump.is_empty() {
        let (key, value) = (varint(&mut dump)?, varint(&mut dump)?);
        if key == 2 << 3 {
            return Some(value);
        }
    }
    None
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Starts a replica of `primary` and waits until it has everything.
pub(super) fn replica(
    command: &[String],
    host: &Host,
    primary: &Arc<Host>,
) -> Result<Process, LabError> {
    let mut command = command.to_vec();
    let (address, port) = (primary.v4().to_string(), PORT.to_string());
    command.extend(["--replicaof".to_owned(), address, port]);
    let process = crate::programs::start(host, &command)?;
    let deadline = Instant::now() + HANG;
    loop {
        let inside = Arc::clone(primary);
        let said = primary.inside(move || ask(&inside, &["INFO", "replication"]))?;
        if said.contains("state=online") {
            return Ok(process);
        }
        if Instant::now() > deadline {
            return Err(LabError::Deadline { what: "a replica".into(), waited: HANG });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A number that Redis tells.
pub(super) fn info(host: &Host, section: &str, name: &str) -> Result<f64, LabError> {
    let said = ask(host, &["INFO", section])?;
    let line = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|number| number.trim().parse().ok());
    number.ok_or_else(|| LabError::Io {
        doing: format!("read {name} of INFO {section}"),
        source: std::io::Error::other(said.clone()),
    })
}

/// Says a command to the Redis of a host, from inside of it; its one-line or bulk reply.
pub(super) fn ask(host: &Host, words: &[&str]) -> Result<String, LabError> {
    say((host.v4(), PORT).into(), words).map_err(|error| LabError::Io {
        doing: format!("say {words:?} to Redis"),
        source: std::io::Error::other(error),
    })
}

/// As [`ask`], to any Redis or Sentinel that this thread can reach.
pub(super) fn say(server: std::net::SocketAddr, words: &[&str]) -> Result<String, ClientError> {
    let mut connection = Connection::open(server, HANG, HANG)?;
    connection.send(resp(words).as_bytes())?;
    let line = String::from_utf8_lossy(connection.line()?).into_owned();
    let Some(count) = line.strip_prefix('$').and_then(|count| count.parse().ok()) else {
        return Ok(line.trim_start_matches('+').to_owned());
    };
    Ok(String::from_utf8_lossy(connection.bytes(count)?).into_owned())
}

fn expect(said: &str, good: &str, command: &str) -> Result<(), LabError> {
    if said == good {
        return Ok(());
    }
    let doing = format!("{command} in Redis");
    Err(LabError::Io { doing, source: std::io::Error::other(said.to_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_criu_froze_a_program_is_read_from_its_statistics() {
        let stats = [
            0x40, 0x59, 0x10, 0x55, 0x06, 0x33, 0x09, 0x57, 0x25, 0, 0, 0, 0x0a, 0x23, 0x08, 0xcd,
            0x18, 0x10, 0xd8, 0x97, 0x02, 0x18, 0x92, 0x5d, 0x20, 0xe8, 0x41, 0x28, 0xc6, 0x2a,
            0x30, 0x00, 0x38, 0xc6, 0x29, 0x40, 0x00, 0x48, 0x00, 0x50, 0x08, 0x58, 0x08, 0x60,
            0x00, 0x68, 0x00, 0x70, 0x00,
        ];
        assert_eq!(frozen_us(&stats), Some(35800));
        assert_eq!(frozen_us(&stats[..20]), None);
        assert_eq!(frozen_us(&[0; 12]), None);
    }
}
