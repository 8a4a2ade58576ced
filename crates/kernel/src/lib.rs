//! Typed handles on the Linux kernel: ptrace, userfaultfd, pagemap, TCP_REPAIR, namespaces. The host side's only unsafe code.

pub mod file_handle;
pub mod namespace;
pub mod xattr;

pub use file_handle::open_fuse_inode;
pub use namespace::Namespaces;
pub use xattr::{get_xattr, list_xattrs, remove_xattr, set_xattr};
