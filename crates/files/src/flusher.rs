//! The thread that uses the served file system as others do: it has the kernel hand over what was
//! written through shared mappings, and look at sizes again.
//!
//! It has a descriptor table of its own, without `/dev/fuse`. An agent that is killed closes its
//! files one by one, and closing one of our mount waits for the agent's own answer to the pages
//! still dirty (`fuse_flush`): with `/dev/fuse` in the same table that is for ever. So no
//! descriptor of a served file may be open beside it, nor may a thread that waits for our answer
//! keep that table open.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc::{Receiver, Sender, channel};

use hotspare_image::files::InodeNumber;
use hotspare_kernel::descriptor::leave_table;
use nix::errno::Errno;

/// Asks the thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Flusher {
    /// Its thread id: an fsync of this thread is no wish to have anything on a disk.
    pub thread: u32,
    wishes: Mutex<(Sender<Wish>, Receiver<Outcome>)>,
}

#[derive(Debug)]
enum Wish {
    /// Have the pages of these files written back, and let go of all others.
    Flush(Vec<InodeNumber>),
    /// Ask for the sizes of these.
    Sizes(Vec<InodeNumber>),
}

type Outcome = Result<(), (InodeNumber, io::Error)>;

impl Flusher {
    /// Starts the thread for the mount with this root directory.
    pub fn start(root: &File) -> io::Result<Flusher> {
        let root: OwnedFd = root.try_clone()?.into();
        let (wish, wishes) = channel();
        let (outcome, outcomes) = channel();
        let (started, starts) = channel();
        std::thread::Builder::new().name("flusher".into()).spawn(move || {
            let own = leave_table(root.as_fd())
                .map_err(io::Error::other)
                .and_then(|()| root.as_fd().try_clone_to_owned());
            let thread = nix::unistd::gettid().as_raw().unsigned_abs();
            // `root` goes back: it is to be closed in the table that it was opened in.
            match own {
                Ok(own) => {
                    let _ = started.send((root, Ok(thread)));
                    serve(own.as_fd(), &wishes, &outcome);
                }
                Err(error) => drop(started.send((root, Err(error)))),
            }
        })?;
        let (root, thread) = starts.recv().map_err(io::Error::other)?;
        drop(root);
        let thread = thread?;
        Ok(Flusher { thread, wishes: Mutex::new((wish, outcomes)) })
    }

    /// Has the pages of these files written back, and lets go of all others.
    pub fn flush(&self, inodes: Vec<InodeNumber>) -> Outcome {
        let first = inodes.first().copied();
        self.ask(Wish::Flush(inodes), first)
    }

    /// Has the kernel ask for the sizes of these files again. It must know them before the guest
    /// appends to a file or touches a mapping beyond the old end: neither makes it ask.
    pub fn refresh_sizes(&self, inodes: Vec<InodeNumber>) -> Outcome {
        let first = inodes.first().copied();
        self.ask(Wish::Sizes(inodes), first)
    }

    fn ask(&self, wish: Wish, first: Option<InodeNumber>) -> Outcome {
        let wishes = self.wishes.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = |_| match first {
            Some(inode) => Err((inode, io::Error::other("the flushing thread has died"))),
            None => Ok(()),
        };
        if wishes.0.send(wish).is_err() {
            return gone(());
        }
        wishes.1.recv().unwrap_or_else(|_| gone(()))
    }
}

fn serve(root: BorrowedFd<'_>, wishes: &Receiver<Wish>, outcome: &Sender<Outcome>) {
    let mut open: HashMap<InodeNumber, File> = HashMap::new();
    for wish in wishes {
        let done = match wish {
            Wish::Flush(inodes) => flush(root, &mut open, &inodes),
            Wish::Sizes(inodes) => refresh_sizes(root, &inodes),
        };
        if outcome.send(done).is_err() {
            return;
        }
    }
}

/// All of them, whatever becomes of one; the first failure.
fn refresh_sizes(root: BorrowedFd<'_>, inodes: &[InodeNumber]) -> Outcome {
    let refresh = |inode: &InodeNumber| refresh_size(root, *inode).map_err(|error| (*inode, error));
    let failures: Vec<_> = inodes.iter().filter_map(|inode| refresh(inode).err()).collect();
    failures.into_iter().next().map_or(Ok(()), Err)
}

fn refresh_size(root: BorrowedFd<'_>, inode: InodeNumber) -> io::Result<()> {
    match hotspare_kernel::open_fuse_inode(root, inode.0, libc::O_PATH) {
        Ok(fd) => File::from(fd).metadata().map(drop),
        Err(Errno::ESTALE | Errno::ENOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn flush(
    root: BorrowedFd<'_>,
    open: &mut HashMap<InodeNumber, File>,
    inodes: &[InodeNumber],
) -> Outcome {
    open.retain(|inode, _| inodes.contains(inode));
    for inode in inodes {
        if !open.contains_key(inode) {
            match hotspare_kernel::open_fuse_inode(root, inode.0, libc::O_RDONLY) {
                Ok(fd) => drop(open.insert(*inode, File::from(fd))),
                // Gone since, and its pages with it.
                Err(Errno::ESTALE | Errno::ENOENT) => continue,
                Err(error) => return Err((*inode, error.into())),
            }
        }
        open[inode].sync_data().map_err(|error| (*inode, error))?;
    }
    Ok(())
}
