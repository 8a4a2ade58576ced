//! Typed handles on the Linux kernel: ptrace, userfaultfd, pagemap, TCP_REPAIR, namespaces. The host side's only unsafe code.

pub mod namespace;

pub use namespace::Namespaces;
