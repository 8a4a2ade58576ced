//! What a descriptor is: told from its link, its type, its device number.

use std::ffi::CString;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use hotspare_kernel::descriptor::{self, FileStat};

use super::device;
use super::error::{ObjectError, ObjectResult};
use super::fdinfo::Header;

/// Kinds of descriptor we know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A file with a path, or an `O_PATH` descriptor of anything but a directory.
    Regular,
    /// A directory.
    Directory,
    /// An unnamed pipe.
    Pipe,
    /// A FIFO.
    Fifo,
    /// eventfd(2).
    EventFd,
    /// epoll(7).
    Epoll,
    /// timerfd_create(2).
    TimerFd,
    /// signalfd(2).
    SignalFd,
    /// inotify(7).
    Inotify,
    /// pidfd_open(2).
    PidFd,
    /// memfd_create(2).
    Memfd,
    /// A device without state.
    Device(device::Stateless),
    /// A terminal.
    Terminal,
    /// Any socket.
    Socket,
    /// A POSIX message queue.
    MessageQueue,
    /// A file of /proc or /sys.
    Proc,
}

impl Class {
    /// Whether what it is can change its name while it stays the same file.
    pub fn has_path(self) -> bool {
        match self {
            Self::Regular | Self::Directory | Self::Fifo | Self::Proc | Self::MessageQueue => true,
            Self::Pipe
            | Self::EventFd
            | Self::Epoll
            | Self::TimerFd
            | Self::SignalFd
            | Self::Inotify
            | Self::PidFd
            | Self::Memfd
            | Self::Device(_)
            | Self::Terminal
            | Self::Socket => false,
        }
    }

    /// Whether its fdinfo can be as empty as that of another kind on the same inode.
    fn may_be_blank(self) -> bool {
        matches!(self, Self::Epoll | Self::Inotify)
    }
}

/// What a description was found to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    identity: (i32, u64, u32, Detail),
    /// Its kind.
    pub class: Class,
    /// Its link, without ` (deleted)`.
    pub path: String,
    /// The link says that it is deleted.
    pub deleted: bool,
    /// What statx(2) said; only where the link is a path.
    pub stat: Option<FileStat>,
}

/// Kind of fdinfo lines behind the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Detail {
    None,
    EventFd,
    Epoll,
    Inotify,
    SignalFd,
    PidFd,
    TimerFd,
}

impl Detail {
    fn of(detail: &[u8]) -> Self {
        let kinds: [(&[u8], Self); 6] = [
            (b"eventfd-count:", Self::EventFd),
            (b"tfd:", Self::Epoll),
            (b"inotify ", Self::Inotify),
            (b"sigmask:", Self::SignalFd),
            (b"Pid:", Self::PidFd),
            (b"clockid:", Self::TimerFd),
        ];
        kinds.iter().find(|(key, _)| detail.starts_with(key)).map_or(Self::None, |found| found.1)
    }
}

fn identity(header: &Header, detail: &[u8]) -> (i32, u64, u32, Detail) {
    (header.mount, header.inode, header.flags, Detail::of(detail))
}

/// A descriptor to classify.
pub struct Subject<'a> {
    /// `/proc/PID/fd` of its process.
    pub numbers: BorrowedFd<'a>,
    /// Its number.
    pub fd: i32,
    /// Its fdinfo.
    pub header: &'a Header,
    /// The rest of its fdinfo.
    pub detail: &'a [u8],
    /// Makes a duplicate of it.
    pub duplicate: &'a dyn Fn() -> ObjectResult<OwnedFd>,
}

/// Longest link: `PATH_MAX` and ` (deleted)`.
const LINK_BYTES_MAX: usize = 4096 + 16;

const DELETED: &[u8] = b" (deleted)";

/// Whether a file of just this name, which ends as if it were deleted, is the one that is open.
fn is_a_name(subject: &Subject<'_>, link: &[u8]) -> bool {
    let mut path = b"../root".to_vec();
    path.extend_from_slice(link);
    let Ok(path) = CString::new(path) else { return false };
    let named = descriptor::stat_at(subject.numbers, &path, true);
    named.is_ok_and(|named| named.inode == subject.header.inode)
}

/// What `subject` is. `before` is what its number was in the last epoch, which is used as far as it
/// is certain that it still holds.
pub fn classify(subject: &Subject<'_>, before: Option<&Arc<Known>>) -> ObjectResult<Arc<Known>> {
    let identity = identity(subject.header, subject.detail);
    let before = before.filter(|known| known.identity == identity);
    if let Some(known) = before
        && !known.class.has_path()
        && !(known.class.may_be_blank() && subject.detail.is_empty())
    {
        return Ok(known.clone());
    }
    let name = CString::new(subject.fd.to_string()).expect("digits");
    let mut buffer = [0u8; LINK_BYTES_MAX];
    let bytes = descriptor::read_link(subject.numbers, &name, &mut buffer)?;
    let link = &buffer[..bytes];
    let (path, deleted) = match link.strip_suffix(DELETED) {
        Some(path) if !is_a_name(subject, link) => (path, true),
        Some(_) | None => (link, false),
    };
    let path = std::str::from_utf8(path).map_err(|_| {
        let what = String::from_utf8_lossy(link).into_owned();
        ObjectError::refused(what, "its name is not UTF-8; rename it")
    })?;
    if let Some(known) = before
        && (known.path.as_str(), known.deleted) == (path, deleted)
    {
        return Ok(known.clone());
    }
    let (class, stat) = match path.starts_with('/') {
        true => {
            let stat = descriptor::stat_at(subject.numbers, &name, false)?;
            (by_type(subject, path, &stat)?, Some(stat))
        }
        false => (by_link(path)?, None),
    };
    Ok(Arc::new(Known { identity, class, path: path.to_owned(), deleted, stat }))
}

/// What an object without a path is, from its link in `/proc/PID/fd`.
pub fn by_link(link: &str) -> ObjectResult<Class> {
    let class = match link {
        "anon_inode:[eventfd]" => Class::EventFd,
        "anon_inode:[eventpoll]" => Class::Epoll,
        "anon_inode:[timerfd]" => Class::TimerFd,
        "anon_inode:[signalfd]" => Class::SignalFd,
        "anon_inode:inotify" => Class::Inotify,
        "anon_inode:[pidfd]" => Class::PidFd,
        link if link.starts_with("pidfd:[") => Class::PidFd,
        link if link.starts_with("socket:[") => Class::Socket,
        link if link.starts_with("pipe:[") => Class::Pipe,
        link => return Err(ObjectError::refused(link, reason_of_link(link))),
    };
    Ok(class)
}

/// Why an object without a path is refused.
fn reason_of_link(link: &str) -> &'static str {
    match link {
        "anon_inode:[io_uring]" => {
            "requests in flight cannot be seen; run the program with io_uring switched off"
        }
        "anon_inode:[userfaultfd]" => "the program handles its own page faults",
        "anon_inode:[fanotify]" => "fanotify watches the host's files",
        "anon_inode:[perf_event]" => "performance counters belong to this host's processor",
        "anon_inode:seccomp notify" => "the program supervises system calls of others",
        link if link.starts_with("anon_inode:bpf") || link.contains("bpf-map") => {
            "BPF programs and maps live in this host's kernel"
        }
        link if link.starts_with("anon_inode:kvm") => "virtual machines cannot be moved",
        link if link.starts_with("anon_inode:") => "this kind of object is not known",
        _ => "a namespace or another object of this host's kernel",
    }
}

const MQUEUE: i64 = 0x1980_0202;
const HUGETLBFS: i64 = 0x9584_58f6;

fn by_type(subject: &Subject<'_>, path: &str, stat: &FileStat) -> ObjectResult<Class> {
    let only_path = subject.header.flags & libc::O_PATH as u32 != 0;
    match stat.kind() {
        libc::S_IFDIR => Ok(Class::Directory),
        _ if only_path => Ok(Class::Regular),
        libc::S_IFREG => regular(subject, path),
        libc::S_IFIFO => Ok(Class::Fifo),
        libc::S_IFCHR => device::classify(path, stat),
        libc::S_IFBLK => Err(ObjectError::refused(path, "block devices cannot be moved")),
        libc::S_IFSOCK => Ok(Class::Socket),
        other => Err(ObjectError::refused(path, format!("files of type {other:#o} are not known"))),
    }
}

fn regular(subject: &Subject<'_>, path: &str) -> ObjectResult<Class> {
    if path.starts_with("/proc/") || path.starts_with("/sys/") {
        return Ok(Class::Proc);
    }
    if path.starts_with("/secretmem") {
        return Err(ObjectError::refused(path, "secret memory cannot be read from outside"));
    }
    // Objects of file systems that are mounted nowhere look like files in the root directory.
    if path[1..].contains('/') && !path.starts_with("/memfd:") {
        return Ok(Class::Regular);
    }
    let file = (subject.duplicate)()?;
    let file = std::os::fd::AsFd::as_fd(&file);
    match descriptor::file_system_kind(file)? {
        MQUEUE => Ok(Class::MessageQueue),
        HUGETLBFS => Err(ObjectError::refused(path, "memory of huge pages is not supported")),
        _ if path.starts_with("/memfd:") && descriptor::seals(file).is_ok() => Ok(Class::Memfd),
        _ => Ok(Class::Regular),
    }
}
