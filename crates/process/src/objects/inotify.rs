//! inotify(7).
//!
//! The kernel watches inodes; fdinfo names them by device and file handle, so the paths have to be
//! found: open_by_handle_at(2) through a mount of the guest that shows the file system. Watch
//! numbers are given out in rising order (and come around only after 2^31), so the ghost gets its
//! numbers by adding and removing until each comes up.
//!
//! Unread events cannot be copied: reading takes them from the guest, and no call puts events into
//! a queue. A checkpoint waits until they are read, but not for ever: if an instance keeps unread
//! events for longer, its reader gets `IN_Q_OVERFLOW` after a failover, the kernel's own way to say
//! that events were lost and that it has to look for itself. That event comes only when more wait
//! than a queue takes, so the ghost's queue is filled and read empty down to it.

use std::collections::HashMap;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use hotspare_image::objects::{Inotify, InotifyWatch};
use hotspare_image::tree::HostPath;
use hotspare_kernel::{HostPid, KernelError, descriptor};

use super::error::{ObjectError, ObjectResult};
use super::fdinfo;
use super::patience::Patience;
use super::restore::{RestoreContext, set_flags};

/// Highest watch number: making the ghost's numbers costs about a microsecond for each below.
const NUMBER_MAX: i32 = 1 << 18;

/// A watch as fdinfo shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    wd: i32,
    mask: u32,
    watched: Watched,
}

/// What is watched, as the kernel names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Watched {
    device: (u32, u32),
    inode: u64,
    handle_kind: i32,
    handle: Vec<u8>,
}

fn parse(detail: &[u8]) -> ObjectResult<Vec<Line>> {
    let mut lines = Vec::new();
    for line in fdinfo::lines(detail) {
        let number = |key: &str| fdinfo::hexadecimal(fdinfo::item(line, key)?);
        // The kernel's own device number: twenty bits of minor.
        let device = number("sdev")? as u32;
        let handle = fdinfo::item(line, "f_handle").map(bytes).unwrap_or_default();
        lines.push(Line {
            wd: number("wd")? as i32,
            mask: number("mask")? as u32,
            watched: Watched {
                device: (device >> 20, device & 0xf_ffff),
                inode: number("ino")?,
                handle_kind: number("fhandle-type").unwrap_or(0) as i32,
                handle,
            },
        });
    }
    Ok(lines)
}

/// Bytes from hexadecimal digits; empty where they are none.
fn bytes(digits: &[u8]) -> Vec<u8> {
    let pairs = digits.chunks_exact(2);
    let bytes: Option<Vec<u8>> =
        pairs.map(|pair| fdinfo::hexadecimal(pair).ok().map(|byte| byte as u8)).collect();
    bytes.unwrap_or_default()
}

/// Paths of watched files, found once and checked at each use.
#[derive(Debug, Default)]
pub struct WatchPaths {
    known: HashMap<Watched, String>,
}

impl WatchPaths {
    fn path(&mut self, host: HostPid, root: BorrowedFd<'_>, watched: &Watched) -> Option<String> {
        if let Some(path) = self.known.get(watched) {
            if leads_to(root, path, watched) {
                return Some(path.clone());
            }
            self.known.remove(watched);
        }
        let path = search(host, root, watched).ok().flatten()?;
        self.known.insert(watched.clone(), path.clone());
        Some(path)
    }
}

/// Whether `path` below the guest's root is the watched file.
fn leads_to(root: BorrowedFd<'_>, path: &str, watched: &Watched) -> bool {
    let below = path.trim_start_matches('/');
    let Ok(below) = CString::new(if below.is_empty() { "." } else { below }) else { return false };
    descriptor::stat_at(root, &below, true)
        .is_ok_and(|stat| (stat.device, stat.inode) == (watched.device, watched.inode))
}

/// Tries all mounts of the file system.
fn search(
    host: HostPid,
    root: BorrowedFd<'_>,
    watched: &Watched,
) -> Result<Option<String>, KernelError> {
    let mounts = std::fs::read_to_string(format!("/proc/{host}/mountinfo"))
        .map_err(KernelError::io("read mounts"))?;
    let device = format!("{}:{}", watched.device.0, watched.device.1);
    for mount in mounts.lines() {
        // "27 1 254:0 / / rw,noatime - ext4 /dev/vda rw"; blanks in paths are \040.
        let mut words = mount.split(' ').skip(2);
        let (Some(number), Some(point)) = (words.next(), words.nth(1)) else { continue };
        if number != device {
            continue;
        }
        let point = point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\");
        let below = point.trim_start_matches('/');
        let below = CString::new(if below.is_empty() { "." } else { below });
        let Some(mount) = below.ok().and_then(|point| descriptor::open_at(root, &point, 0).ok())
        else {
            continue;
        };
        let found = descriptor::open_handle(mount.as_fd(), watched.handle_kind, &watched.handle)?;
        let Some(found) = found else { continue };
        let link = std::fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd()))
            .map_err(KernelError::io("read link"))?;
        if let Some(path) = link.to_str().filter(|path| leads_to(root, path, watched)) {
            return Ok(Some(path.to_owned()));
        }
    }
    Ok(None)
}

/// The image of an instance of process `host`.
pub fn capture(
    detail: &[u8],
    instance: BorrowedFd<'_>,
    host: HostPid,
    paths: &mut WatchPaths,
    patience: &mut Patience,
) -> ObjectResult<Inotify> {
    let unread = descriptor::readable_bytes(instance)?;
    let overflow = unread != 0;
    if overflow && !patience.is_exhausted() {
        let reason = format!("it holds {unread} bytes of events that the program has not read");
        return Err(ObjectError::transient("an inotify instance", reason));
    }
    let mut watches = Vec::new();
    let lines = parse(detail)?;
    if lines.is_empty() {
        return Ok(Inotify { watches, queued: Vec::new(), overflow });
    }
    let path = CString::new(format!("/proc/{host}/root")).expect("digits");
    let directory = libc::O_DIRECTORY | libc::O_PATH;
    let root = descriptor::open_at(super::working_directory(), &path, directory)?;
    for line in lines {
        let what = || format!("an inotify watch on inode {}", line.watched.inode);
        if line.wd > NUMBER_MAX {
            let reason = format!("its number {} is above {NUMBER_MAX}", line.wd);
            return Err(ObjectError::refused(what(), reason));
        }
        let Some(path) = paths.path(host, root.as_fd(), &line.watched) else {
            let reason = "its path cannot be found: the file has no name any more, or its file \
                system (overlayfs) does not open files by handle";
            return Err(ObjectError::refused(what(), reason));
        };
        watches.push(InotifyWatch { wd: line.wd, path: HostPath(path), mask: line.mask });
    }
    watches.sort_by_key(|watch| watch.wd);
    Ok(Inotify { watches, queued: Vec::new(), overflow })
}

/// Makes an instance with the same watches under the same numbers and nothing to read but, where
/// events were lost, that.
pub fn restore(image: &Inotify, flags: u32, context: &RestoreContext<'_>) -> ObjectResult<OwnedFd> {
    if !image.queued.is_empty() {
        return Err(ObjectError::Image("inotify events, which nobody can put back".to_owned()));
    }
    let file = descriptor::inotify(libc::IN_NONBLOCK)?;
    let mut highest = 0;
    for watch in &image.watches {
        if watch.wd <= highest || watch.wd > NUMBER_MAX {
            return Err(ObjectError::Image(format!("inotify watch number {}", watch.wd)));
        }
        add(&file, watch, highest)?;
        highest = watch.wd;
    }
    if image.overflow {
        overflow(&file, context)?;
    } else {
        drain(&file)?;
    }
    set_flags(&file, flags)?;
    Ok(file)
}

/// Bytes of an event without a name: `struct inotify_event`.
const EVENT_BYTES: usize = 16;
/// Looks at the fill level after so many events.
const EVENTS_PER_LOOK: usize = 512;

/// Lets the queue overflow and reads all events but the last, which says so.
fn overflow(file: &OwnedFd, context: &RestoreContext<'_>) -> ObjectResult<()> {
    let io = |verb| move |errno: nix::errno::Errno| KernelError::from_errno(verb, errno as i32);
    // Equal events in a row become one, so two files take turns.
    let files = [scratch_file(context)?, scratch_file(context)?];
    let mut watches = Vec::new();
    for scratch in &files {
        watches.push(context.watch_own(file.as_fd(), scratch.as_fd(), libc::IN_MODIFY)?);
    }
    let mut before = usize::MAX;
    loop {
        let unread = descriptor::readable_bytes(file.as_fd())?;
        if unread == before {
            break;
        }
        before = unread;
        for turn in 0..EVENTS_PER_LOOK {
            nix::unistd::write(&files[turn % 2], b"x").map_err(io("fill event queue"))?;
        }
    }
    for wd in watches {
        descriptor::remove_watch(file.as_fd(), wd)?;
    }
    let mut buffer = [0u8; 16 * 1024];
    loop {
        let unread = descriptor::readable_bytes(file.as_fd())?;
        let room = unread.saturating_sub(EVENT_BYTES).min(buffer.len());
        if room == 0 {
            return Ok(());
        }
        nix::unistd::read(file, &mut buffer[..room]).map_err(io("drain inotify"))?;
    }
}

/// A memory file, opened in the way whose writes are noticed.
fn scratch_file(context: &RestoreContext<'_>) -> ObjectResult<OwnedFd> {
    let memory = hotspare_kernel::spawn::memfd(c"events")?;
    context.reopen(memory.as_fd(), (libc::O_WRONLY | libc::O_APPEND) as u32)
}

/// Adds a watch until it gets its number; those up to `highest` are in use or were.
fn add(file: &OwnedFd, watch: &InotifyWatch, highest: i32) -> ObjectResult<()> {
    let path = CString::new(watch.path.0.as_bytes())
        .map_err(|_| ObjectError::Image("a watched path with a zero byte".to_owned()))?;
    // The path was resolved to the end: where it is a link, the link itself is watched.
    let mask = watch.mask | libc::IN_DONT_FOLLOW;
    loop {
        let wd = descriptor::add_watch(file.as_fd(), &path, mask)
            .map_err(ObjectError::kernel(watch.path.0.clone()))?;
        if wd == watch.wd {
            return Ok(());
        }
        if wd <= highest || wd > watch.wd {
            let reason = "two watches lead to one file on this host";
            return Err(ObjectError::refused(&watch.path.0, reason));
        }
        descriptor::remove_watch(file.as_fd(), wd)?;
    }
}

/// Reads away what our own adding and removing queued (`IN_IGNORED`).
fn drain(file: &OwnedFd) -> ObjectResult<()> {
    let mut buffer = [0u8; 16 * 1024];
    loop {
        match nix::unistd::read(file, &mut buffer) {
            Ok(0) | Err(nix::errno::Errno::EAGAIN) => return Ok(()),
            Ok(_) => {}
            Err(errno) => {
                return Err(KernelError::from_errno("drain inotify", errno as i32).into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watches_are_read_as_the_kernel_shows_them() {
        let detail = b"inotify wd:1f ino:9840a7 sdev:fe00003 mask:80000fff ignored_mask:0 \
            fhandle-bytes:8 fhandle-type:1 f_handle:a740980052dc13dc\n";
        let lines = parse(detail).unwrap();
        assert_eq!((lines[0].wd, lines[0].mask), (31, 0x8000_0fff));
        assert_eq!(lines[0].watched.device, (254, 3));
        assert_eq!(lines[0].watched.handle, [0xa7, 0x40, 0x98, 0, 0x52, 0xdc, 0x13, 0xdc]);
    }
}
