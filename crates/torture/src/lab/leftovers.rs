//! What a killed run leaves: cgroups with processes in them, and directories. Their names say
//! whose they are, so that the next run can tell the dead from the living.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;

use super::cell::{cgroup_root, memory_root, remove_group};
use super::{Doing, LabError};

const PREFIX: &str = "hotspare-lab-";
const PARENT: &str = "/var/tmp";

/// This process, as part of a name: its pid and start time, since pids are used again.
pub(super) fn owner() -> String {
    let pid = std::process::id();
    format!("{PREFIX}{pid}-{}", start_time(pid).unwrap_or_default())
}

/// Makes the directory of a new lab.
pub(super) fn claim_dir() -> Result<PathBuf, LabError> {
    static LABS: AtomicU32 = AtomicU32::new(0);
    let number = LABS.fetch_add(1, Ordering::Relaxed);
    let dir = Path::new(PARENT).join(format!("{}-{number}", owner()));
    fs::create_dir(&dir).doing(|| format!("make {}", dir.display()))?;
    Ok(dir)
}

/// Removes the directory of a lab.
pub(super) fn release_dir(dir: &Path) {
    if let Err(error) = fs::remove_dir_all(dir)
        && dir.exists()
    {
        tracing::warn!(dir = %dir.display(), %error, "the directory of a lab stays behind");
    }
}

/// Removes what runs that have ended without cleaning up have left.
pub(super) fn sweep() -> Result<(), LabError> {
    for group in orphans(&cgroup_root()?)? {
        match remove_group(&group) {
            Err(error) if group.exists() && !is_of_one_removed(&error) => return Err(error),
            // Another run may sweep at this moment: what is gone is gone.
            Ok(()) | Err(_) => {}
        }
    }
    for group in memory_root()?.map_or(Ok(Vec::new()), |root| orphans(&root))? {
        // Its processes have ended above; if not, the next run tries again.
        let _ = fs::remove_dir(group);
    }
    for dir in orphans(Path::new(PARENT))? {
        release_dir(&dir);
    }
    Ok(())
}

/// Files of a cgroup that were opened before somebody else removed it answer ENODEV.
fn is_of_one_removed(error: &LabError) -> bool {
    let LabError::Io { source, .. } = error else { return false };
    source.raw_os_error() == Some(Errno::ENODEV as i32)
}

/// The entries of `parent` that belong to a process that is no more.
fn orphans(parent: &Path) -> Result<Vec<PathBuf>, LabError> {
    let entries = fs::read_dir(parent).doing(|| format!("read {}", parent.display()))?;
    let is_orphan = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        owner_of(name).is_some_and(|(pid, started)| start_time(pid) != Some(started))
    };
    Ok(entries.flatten().map(|entry| entry.path()).filter(is_orphan).collect())
}

/// The pid and start time in a name made by [`owner`], with anything behind it.
fn owner_of(name: &str) -> Option<(u32, u64)> {
    let mut parts = name.strip_prefix(PREFIX)?.split(['-', '.']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Start time of a process in clock ticks after boot: field 22 of `/proc/PID/stat` (proc(5)).
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = &stat[stat.rfind(')')? + 1..];
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_owner() {
        let (pid, started) = owner_of(&format!("{}-3.host0", owner())).unwrap();
        assert_eq!(pid, std::process::id());
        assert_eq!(Some(started), start_time(pid));
        assert_eq!(owner_of("hotspare-lab-x"), None);
        assert_eq!(owner_of("other-12-13"), None);
    }
}
