//! Hosts whose disk is full or slow, and hosts that have no memory left.
//!
//! The disk is [`DISK`], a file system of its own on hosts that are made so
//! (see [`crate::Lab::with_disks`]). Memory is that of a cgroup which every agent enters.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};

use crate::Host;

/// Where a host's disk is mounted.
pub const DISK: &str = "/var/lib/hotspare";
const BALLAST: &str = "/var/lib/hotspare/ballast";

/// A disk without a free byte, until this ends.
#[derive(Debug)]
pub struct FullDisk {
    host: Arc<Host>,
    filled: io::Result<u64>,
}

impl FullDisk {
    /// Writes until nothing more goes in.
    pub fn fill(host: &Arc<Host>) -> FullDisk {
        let filled = host.inside(|| {
            let mut ballast = File::create(BALLAST)?;
            let mut written = 0;
            for block in [1 << 20, 4096, 1] {
                let block = vec![0xb5; block];
                loop {
                    match ballast.write(&block) {
                        Ok(count) => written += count as u64,
                        Err(error) if error.kind() == io::ErrorKind::StorageFull => break,
                        Err(error) => return Err(error),
                    }
                }
            }
            Ok(written)
        });
        FullDisk { host: Arc::clone(host), filled }
    }

    /// Makes room again; 1 if the kernel had said that there is none.
    pub fn end(self) -> (u64, String) {
        // A host that has started anew has a new disk.
        let _ = self.host.inside(|| fs::remove_file(BALLAST));
        match self.filled {
            Ok(bytes) => (1, format!("ENOSPC after {bytes} bytes more")),
            Err(error) => (0, format!("the disk was not filled: {error}")),
        }
    }
}

/// A disk on which each file takes long to open, until this ends: fanotify(7) asks us before each
/// open.
#[derive(Debug)]
pub struct SlowDisk {
    stop: Arc<AtomicBool>,
    opens: Arc<AtomicU64>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl SlowDisk {
    /// Each file that is opened takes `late` from now on.
    pub fn brake(host: &Arc<Host>, late: Duration) -> SlowDisk {
        let (stop, opens) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let shared = (Arc::clone(&stop), Arc::clone(&opens));
        let thread = Some(host.thread(move || brake(late, &shared.0, &shared.1)));
        SlowDisk { stop, opens, thread }
    }

    /// It is as fast as before; how many files have waited.
    pub fn end(mut self) -> (u64, String) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        let opens = self.opens.load(Ordering::Relaxed);
        match ended {
            Some(Ok(Err(error))) => (0, format!("the disk was not slow: {error}")),
            _ => (opens, format!("{opens} opens waited")),
        }
    }
}

fn brake(late: Duration, stop: &AtomicBool, opens: &AtomicU64) -> io::Result<()> {
    let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_NONBLOCK | InitFlags::FAN_CLOEXEC;
    let group = Fanotify::init(flags, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC)?;
    let mark = MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_MOUNT;
    group.mark(mark, MaskFlags::FAN_OPEN_PERM, nix::fcntl::AT_FDCWD, Some(DISK))?;
    // Closing the group lets through whoever still waits.
    while !stop.load(Ordering::Relaxed) {
        let events = match group.read_events() {
            Ok(events) => events,
            Err(nix::errno::Errno::EAGAIN) => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(errno) => return Err(errno.into()),
        };
        for event in events {
            let Some(fd) = event.fd() else { continue };
            if !stop.load(Ordering::Relaxed) {
                std::thread::sleep(late);
            }
            opens.fetch_add(1, Ordering::Relaxed);
            group.write_response(FanotifyResponse::new(fd, Response::FAN_ALLOW))?;
        }
    }
    Ok(())
}

/// A host that has no memory left for agent and guest, until this ends: whoever wants more waits.
#[derive(Debug)]
pub struct NoMemory {
    group: PathBuf,
    taken: io::Result<u64>,
}

impl NoMemory {
    /// What is used now is all there is.
    pub fn take(host: &Arc<Host>) -> NoMemory {
        let group = host.memory_group();
        NoMemory { taken: limit(&group), group }
    }

    /// There is enough again; how often somebody wanted more in vain.
    pub fn end(self) -> (u64, String) {
        let before = match self.taken {
            Ok(before) => before,
            Err(error) => return (0, format!("memory was not limited: {error}")),
        };
        let failed = refusals(&self.group).unwrap_or(before).saturating_sub(before);
        match unlimit(&self.group) {
            Ok(()) => (failed, format!("{failed} allocations had to wait")),
            Err(error) => (0, format!("the limit stays: {error}")),
        }
    }
}

/// cgroup v2 throttles above `memory.high`. In v1 there is no such thing: who wants more than the
/// limit stands still, as nobody is killed for it.
fn limit(group: &Path) -> io::Result<u64> {
    let before = refusals(group)?;
    let used = |file: &str| -> io::Result<u64> {
        let text = fs::read_to_string(group.join(file))?;
        text.trim().parse().map_err(io::Error::other)
    };
    if is_v2(group) {
        fs::write(group.join("memory.high"), used("memory.current")?.to_string())?;
    } else {
        fs::write(group.join("memory.oom_control"), "1")?;
        let mut wanted = used("memory.usage_in_bytes")?;
        // It grows while it is being limited.
        while let Err(error) = fs::write(group.join("memory.limit_in_bytes"), wanted.to_string()) {
            if error.raw_os_error() != Some(nix::errno::Errno::EBUSY as i32) {
                return Err(error);
            }
            wanted += 1 << 20;
        }
    }
    Ok(before)
}

fn unlimit(group: &Path) -> io::Result<()> {
    match is_v2(group) {
        true => fs::write(group.join("memory.high"), "max"),
        false => fs::write(group.join("memory.limit_in_bytes"), "-1"),
    }
}

fn is_v2(group: &Path) -> bool {
    group.join("memory.high").exists()
}

fn refusals(group: &Path) -> io::Result<u64> {
    if is_v2(group) {
        let events = fs::read_to_string(group.join("memory.events"))?;
        let high = events.lines().find_map(|line| line.strip_prefix("high "));
        return Ok(high.and_then(|count| count.parse().ok()).unwrap_or(0));
    }
    let count = fs::read_to_string(group.join("memory.failcnt"))?;
    count.trim().parse().map_err(io::Error::other)
}
