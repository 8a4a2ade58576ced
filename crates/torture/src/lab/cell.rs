//! The processes of one host, as a cgroup: nothing that is forked inside gets out, whatever
//! sessions, groups or pid namespaces it makes, and all of it can be killed at once.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Doing, LabError};
use crate::clock::Instant;

/// Where cgroup v2 is mounted if the machine has not done so.
const OWN_MOUNT: &str = "/run/hotspare-lab-cgroup2";
/// A killed process may be in the middle of dumping gigabytes; this is a hang, not a duration.
const DEATH_AT_MOST: Duration = Duration::from_secs(30);
/// Who can be frozen is by then.
const FROZEN_AT_MOST: Duration = Duration::from_millis(50);

/// A cgroup that is removed, processes and all, when dropped.
#[derive(Debug)]
pub(super) struct Cell {
    dir: PathBuf,
    /// Where memory is accounted for.
    memory: PathBuf,
}

impl Cell {
    /// Makes the cgroup of host `name` of the lab with directory `lab`.
    pub(super) fn new(owner: &str, lab: &Path, name: &str) -> Result<Cell, LabError> {
        let lab = lab.file_name().and_then(|name| name.to_str()).unwrap_or(owner);
        let dir = cgroup_root()?.join(format!("{lab}.{name}"));
        fs::create_dir(&dir).doing(|| format!("make cgroup {}", dir.display()))?;
        let memory = match memory_root()? {
            Some(root) => root.join(format!("{lab}.{name}")),
            None => dir.clone(),
        };
        if memory != dir {
            fs::create_dir(&memory).doing(|| format!("make cgroup {}", memory.display()))?;
        }
        Ok(Cell { dir, memory })
    }

    pub(super) fn memory_group(&self) -> PathBuf {
        self.memory.clone()
    }

    /// The file that takes a process in, when `0` is written by it.
    pub(super) fn procs(&self) -> Result<OwnedFd, LabError> {
        let path = self.dir.join("cgroup.procs");
        let file = File::options().write(true).open(&path);
        Ok(file.doing(|| format!("open {}", path.display()))?.into())
    }

    /// SIGKILL to every process; returns when the last is gone (zombies do not count).
    pub(super) fn kill_all(&self) -> Result<(), LabError> {
        kill_group(&self.dir)?;
        self.write("cgroup.freeze", "0")
    }

    pub(super) fn kill_all_quietly(&self) {
        if let Err(error) = self.kill_all() {
            tracing::error!(%error, "a host of the lab cannot be killed");
        }
    }

    /// Freezes or thaws all processes; returns when it is so.
    ///
    /// A thread that waits for another of the same host without being able to be interrupted (for
    /// a FUSE server, say) is never frozen in the eyes of the kernel. It stands still, too: then
    /// it is enough that nobody uses a processor any more.
    pub(super) fn freeze(&self, frozen: bool) -> Result<(), LabError> {
        let digit = if frozen { "1" } else { "0" };
        self.write("cgroup.freeze", digit)?;
        let event = format!("frozen {digit}");
        if !frozen || wait_for(&self.dir, &event, FROZEN_AT_MOST)? {
            return if frozen { Ok(()) } else { wait_for_event(&self.dir, &event) };
        }
        let deadline = Instant::now() + DEATH_AT_MOST;
        loop {
            let before = self.used_s()?;
            if wait_for(&self.dir, &event, FROZEN_AT_MOST)? || self.used_s()? == before {
                return Ok(());
            }
            if Instant::now() > deadline {
                let what = format!("`{event}` in {}", self.dir.display());
                return Err(LabError::Deadline { what, waited: DEATH_AT_MOST });
            }
        }
    }

    /// The processes in it.
    pub(super) fn pids(&self) -> Vec<i32> {
        let all = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        all.lines().filter_map(|line| line.parse().ok()).collect()
    }

    pub(super) fn is_populated(&self) -> Result<bool, LabError> {
        let path = self.dir.join("cgroup.events");
        let events = fs::read_to_string(&path).doing(|| format!("read {}", path.display()))?;
        Ok(events.contains("populated 1"))
    }

    /// Processor time of all processes so far, also of those that have ended, in seconds.
    pub(super) fn used_s(&self) -> Result<f64, LabError> {
        let path = self.dir.join("cpu.stat");
        let doing = || format!("read {}", path.display());
        let stat = fs::read_to_string(&path).doing(doing)?;
        let used = stat.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok());
        let used: f64 = used.ok_or(io::ErrorKind::InvalidData).doing(doing)?;
        Ok(used / 1e6)
    }

    fn write(&self, file: &str, value: &str) -> Result<(), LabError> {
        let path = self.dir.join(file);
        fs::write(&path, value).doing(|| format!("write {value} to {}", path.display()))
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        if let Err(error) = remove_group(&self.dir) {
            tracing::error!(%error, "a cgroup of the lab stays behind");
        }
        if self.memory != self.dir {
            // Nobody is in it any more; the next run sweeps what stays.
            let _ = fs::remove_dir(&self.memory);
        }
    }
}

/// Where memory is limited on machines with the cgroups of v1.
pub(super) fn memory_root() -> Result<Option<PathBuf>, LabError> {
    let mounts = fs::read_to_string("/proc/self/mountinfo");
    let mounts = mounts.doing(|| "read /proc/self/mountinfo".to_owned())?;
    let found = mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let options = after.strip_prefix("cgroup ")?.rsplit(' ').next()?;
        options.split(',').any(|option| option == "memory").then(|| before.split(' ').nth(4))?
    });
    Ok(found.map(PathBuf::from))
}

/// Where cgroup v2 is: `/sys/fs/cgroup` on most machines, elsewhere on hybrid ones. Mounts it if
/// it is nowhere.
pub(super) fn cgroup_root() -> Result<PathBuf, LabError> {
    let mounts = fs::read_to_string("/proc/self/mountinfo");
    let mounts = mounts.doing(|| "read /proc/self/mountinfo".to_owned())?;
    let found = mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        after.starts_with("cgroup2 ").then(|| before.split(' ').nth(4))?
    });
    if let Some(path) = found {
        return Ok(PathBuf::from(path));
    }
    fs::create_dir_all(OWN_MOUNT).doing(|| format!("make {OWN_MOUNT}"))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("cgroup2"), OWN_MOUNT, Some("cgroup2"), flags, None::<&str>)
        .doing(|| format!("mount cgroup2 at {OWN_MOUNT}"))?;
    Ok(PathBuf::from(OWN_MOUNT))
}

/// Kills and removes a cgroup and those below it. One that is not there is fine.
pub(super) fn remove_group(dir: &Path) -> Result<(), LabError> {
    if !dir.exists() {
        return Ok(());
    }
    kill_group(dir)?;
    remove_empty(dir).doing(|| format!("remove cgroup {}", dir.display()))
}

fn kill_group(dir: &Path) -> Result<(), LabError> {
    let path = dir.join("cgroup.kill");
    fs::write(&path, "1").doing(|| format!("write 1 to {}", path.display()))?;
    wait_for_event(dir, "populated 0")
}

fn remove_empty(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove_empty(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

/// Waits for a line of `cgroup.events`, which is an error if it does not come.
fn wait_for_event(dir: &Path, line: &str) -> Result<(), LabError> {
    if wait_for(dir, line, DEATH_AT_MOST)? {
        return Ok(());
    }
    let what = format!("`{line}` in {}", dir.join("cgroup.events").display());
    Err(LabError::Deadline { what, waited: DEATH_AT_MOST })
}

/// Waits for a line of `cgroup.events`; the kernel wakes us at each change of it. Whether it came.
fn wait_for(dir: &Path, line: &str, at_most: Duration) -> Result<bool, LabError> {
    let path = dir.join("cgroup.events");
    let doing = || format!("read {}", path.display());
    let mut file = File::open(&path).doing(doing)?;
    let deadline = Instant::now() + at_most;
    loop {
        let mut events = String::new();
        file.rewind().doing(doing)?;
        file.read_to_string(&mut events).doing(doing)?;
        if events.lines().any(|event| event == line) {
            return Ok(true);
        }
        let left = deadline.since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let mut polled = [PollFd::new(file.as_fd(), PollFlags::POLLPRI)];
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        poll(&mut polled, timeout).doing(doing)?;
    }
}
