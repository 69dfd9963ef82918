! Records as Fortran programs write them: sequential unformatted, stream, direct access, formatted.
! usage: records DIR
program records
  implicit none
  integer, parameter :: n = 50000
  real(8) :: field(n), found(n)
  integer :: step, i
  character(len=4000) :: dir
  call get_command_argument(1, dir)
  do step = 1, 8
    do i = 1, n
      field(i) = real(i, 8) * step
    end do
    open(10, file=trim(dir)//'/sequential', form='unformatted', position='append')
    write(10) step, field
    close(10)
  end do
  open(11, file=trim(dir)//'/stream', form='unformatted', access='stream')
  write(11) field
  write(11, pos=801) -field(1:10)
  inquire(11, size=i)
  print *, 'stream', i
  close(11)
  open(12, file=trim(dir)//'/direct', form='unformatted', access='direct', recl=8000)
  do step = 20, 1, -1
    write(12, rec=step) field(step:step+999)
  end do
  read(12, rec=7) found(1:1000)
  print *, 'direct', all(found(1:1000) == field(7:1006))
  close(12)
  open(13, file=trim(dir)//'/formatted')
  do i = 1, 20000
    write(13, '(i8, es24.16)') i, field(i)
  end do
  flush(13)
  rewind(13)
  read(13, *) step, found(1)
  print *, 'formatted', step, found(1) == field(1)
  close(13)
  open(10, file=trim(dir)//'/sequential', form='unformatted', status='old')
  do i = 1, 8
    read(10) step, found
    print *, step, found(n) == real(n, 8) * i
  end do
  close(10)
end program
