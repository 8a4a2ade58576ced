//! Descriptors that lead out of the guest: those `hotspare run` got from whoever started it, and
//! terminals. The other host has nothing of the kind: there they lead to /dev/null, or to what the
//! spare was given instead.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use hotspare_image::objects::OutsideFile;
use hotspare_image::tree::HostPath;
use hotspare_kernel::descriptor::{self, FileStat, Place};

use super::class::Class;
use super::error::{ObjectError, ObjectResult};
use super::fdinfo::Header;
use super::restore::RestoreContext;

/// One of the agent's descriptors that the guest was started with.
#[derive(Debug)]
pub struct OutsideDescriptor {
    standard: i32,
    file: OwnedFd,
    stat: FileStat,
}

impl OutsideDescriptor {
    /// Standard descriptor `standard` (0, 1 or 2), of which `file` is one of ours.
    pub fn new(standard: i32, file: OwnedFd) -> ObjectResult<Self> {
        let stat = descriptor::stat(file.as_fd())?;
        Ok(Self { standard, file, stat })
    }

    fn kind(&self) -> &'static str {
        match self.stat.kind() {
            libc::S_IFCHR => "terminal",
            libc::S_IFIFO => "pipe",
            libc::S_IFSOCK => "socket",
            _ => "file",
        }
    }

    fn image(&self) -> OutsideFile {
        OutsideFile { standard: self.standard, kind: self.kind().to_owned() }
    }
}

/// Whether the description at `place`, of kind `class`, leads out of the guest, and where to.
///
/// The very descriptions we were started with do; so do others on the same terminal, pipe or
/// socket. A file that the guest opened itself is a file of the guest, even if our output goes
/// there too.
pub fn capture(
    outside: &[OutsideDescriptor],
    class: Class,
    header: &Header,
    place: Place,
    stat: impl Fn() -> ObjectResult<FileStat>,
) -> ObjectResult<Option<OutsideFile>> {
    match class {
        Class::Terminal | Class::Pipe | Class::Fifo | Class::Socket | Class::Regular => {}
        // The same on every host, or made by the guest.
        Class::Device(_)
        | Class::Directory
        | Class::EventFd
        | Class::Epoll
        | Class::TimerFd
        | Class::SignalFd
        | Class::Inotify
        | Class::PidFd
        | Class::Memfd
        | Class::MessageQueue
        | Class::Proc => return Ok(None),
    }
    for each in outside.iter().filter(|each| each.stat.inode == header.inode) {
        let ours = (super::own_pid(), each.file.as_raw_fd());
        if descriptor::compare_files(ours, place)?.is_eq() {
            return Ok(Some(each.image()));
        }
        let same = class != Class::Regular && stat()?.device == each.stat.device;
        if same {
            return Ok(Some(each.image()));
        }
    }
    if class != Class::Terminal {
        return Ok(None);
    }
    // /dev/tty and /dev/console (major 5) are other names of the terminal we were started on.
    let by_name = stat()?.special.0 == 5;
    match outside.iter().find(|each| by_name && each.stat.kind() == libc::S_IFCHR) {
        Some(each) => Ok(Some(each.image())),
        None => {
            let reason = "a terminal that was not among the standard descriptors cannot be moved";
            Err(ObjectError::refused("a terminal", reason))
        }
    }
}

/// What takes its place on this host.
pub fn restore(
    image: &OutsideFile,
    flags: u32,
    context: &RestoreContext<'_>,
) -> ObjectResult<OwnedFd> {
    match context.parts.outside(image.standard) {
        Some(file) => Ok(duplicate(file)?),
        None => {
            let kept = (libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK) as u32;
            context.open(&HostPath("/dev/null".to_owned()), flags & kept)
        }
    }
}

fn duplicate(file: BorrowedFd<'_>) -> ObjectResult<OwnedFd> {
    let copy = file.try_clone_to_owned();
    Ok(copy.map_err(hotspare_kernel::KernelError::io("duplicate descriptor"))?)
}
