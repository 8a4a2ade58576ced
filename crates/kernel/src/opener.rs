//! Opens files of our own FUSE mounts, on a thread that does not hold `/dev/fuse`.
//!
//! A thread inside open(2) or a lookup waits for an answer that only this process can give. If the
//! process is killed in that instant, the thread stays until the kernel gives up the mount, which
//! it does when `/dev/fuse` is closed; and a descriptor table is closed by the last thread that
//! uses it. So whoever waits must not be the one that keeps the table open: the thread here has a
//! table of its own, with one socket in it, through which the opened files come back.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{OFlag, open};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::stat::Mode;

use crate::descriptor::leave_table;
use crate::socket::{self, Outgoing};

/// What to open.
#[derive(Debug)]
enum Wish {
    Path(PathBuf, i32),
    /// A file without a name, below the root of its mount.
    Inode(PathBuf, u64, i32),
}

/// Opens files for others, in the mount namespace of the thread that started it. Its thread ends
/// when this is dropped.
#[derive(Debug)]
pub struct Opener(Mutex<Ends>);

#[derive(Debug)]
struct Ends {
    wishes: Sender<Wish>,
    answers: Receiver<io::Result<()>>,
    files: OwnedFd,
}

impl Opener {
    /// Starts the thread, in the namespaces of the calling one.
    pub fn start() -> io::Result<Opener> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        let (wishes, wished) = channel();
        let (answer, answers) = channel();
        let (started, starts) = channel();
        std::thread::Builder::new().name("opener".into()).spawn(move || {
            let own = leave_table(theirs.as_fd())
                .map_err(io::Error::other)
                .and_then(|()| theirs.as_fd().try_clone_to_owned());
            // `theirs` goes back: it is to be closed in the table that it was opened in.
            match own {
                Ok(own) => {
                    let _ = started.send((theirs, Ok(())));
                    serve(own.as_fd(), &wished, &answer);
                }
                Err(error) => drop(started.send((theirs, Err(error)))),
            }
        })?;
        let (theirs, left) = starts.recv().map_err(io::Error::other)?;
        drop(theirs);
        left?;
        Ok(Opener(Mutex::new(Ends { wishes, answers, files: ours })))
    }

    /// open(2) with `flags`.
    pub fn open(&self, path: &Path, flags: i32) -> io::Result<OwnedFd> {
        self.ask(Wish::Path(path.to_owned(), flags))
    }

    /// Opens inode `inode` of the FUSE mount with this root.
    pub fn open_inode(&self, root: &Path, inode: u64, flags: i32) -> io::Result<OwnedFd> {
        self.ask(Wish::Inode(root.to_owned(), inode, flags))
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, wish: Wish) -> io::Result<OwnedFd> {
        let dead = || io::Error::other("the thread that opens files has died");
        let ends = self.ends();
        ends.wishes.send(wish).map_err(|_| dead())?;
        ends.answers.recv().map_err(|_| dead())??;
        let message = socket::receive_message(ends.files.as_fd(), 1, libc::MSG_DONTWAIT);
        let message = message.map_err(io::Error::other)?;
        message.and_then(|message| message.files.into_iter().next()).ok_or_else(dead)
    }
}

fn serve(files: BorrowedFd<'_>, wishes: &Receiver<Wish>, answer: &Sender<io::Result<()>>) {
    for wish in wishes {
        let sent = fulfil(wish).and_then(|file| {
            let message = Outgoing { bytes: &[0], files: &[file.as_fd()], ..Outgoing::default() };
            socket::send_message(files, message).map(drop).map_err(io::Error::other)
        });
        if answer.send(sent).is_err() {
            return;
        }
    }
}

fn fulfil(wish: Wish) -> io::Result<OwnedFd> {
    match wish {
        Wish::Path(path, flags) => {
            let flags = OFlag::from_bits_retain(flags | libc::O_CLOEXEC);
            Ok(open(&path, flags, Mode::empty())?)
        }
        Wish::Inode(root, inode, flags) => {
            let root = File::open(root)?;
            Ok(crate::open_fuse_inode(root.as_fd(), inode, flags)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn files_come_from_a_thread_that_has_none_of_our_descriptors() {
        let path = Path::new("/proc/self/comm");
        let content = std::fs::read_to_string("/proc/self/comm").unwrap();
        let opener = Opener::start().unwrap();
        for _ in 0..1000 {
            let mut said = String::new();
            let file = opener.open(path, libc::O_RDONLY).unwrap();
            File::from(file).read_to_string(&mut said).unwrap();
            assert_eq!(said, content);
        }
        let error = opener.open(Path::new("/proc/none"), libc::O_RDONLY).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        // What it sees of itself: standard streams, its socket, and the directory it reads.
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let opener_task = tasks.flatten().find(|task| {
            std::fs::read_to_string(task.path().join("comm")).unwrap_or_default() == "opener\n"
        });
        let table = opener_task.unwrap().path().join("fd");
        let open: Vec<_> = std::fs::read_dir(table).unwrap().flatten().collect();
        assert!(open.len() <= 5, "{open:?}");
    }
}
